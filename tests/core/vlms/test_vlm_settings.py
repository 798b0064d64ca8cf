"""Settings in the folder of a VLM."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_rl_core.vlms import _base, _settings
from tests.nested import require_named

READERS: dict[str, Callable[[Path], object]] = {
    "settings of a VLM": lambda file: _settings.json_object(str(file.parent), file.name),
    "class of a VLM": lambda file: _base.architecture(file.parent),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_nested_too_deep_is_named(tmp_path: Path, reader: str):
    require_named(tmp_path, READERS[reader])
