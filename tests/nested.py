"""JSON that is nested without end, and what readers of files do with it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError

DEEP = "[" * 100_000 + "]" * 100_000
WHY = "nested too deep to be read"


def require_named(folder: Path, read: Callable[[Path], object]) -> None:
    """Require that a reader names a file that is nested too deep."""
    (file := folder / "config.json").write_text(DEEP, encoding="utf-8")
    with pytest.raises(ConfigError, match=WHY) as refused:
        read(file)
    assert file.name in str(refused.value)
