"""Characters that change a terminal or turn text around are escaped wherever they are shown."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cosmos_rl_core.importers import native_weights
from flows.library.collected import Collected
from flows.planning.run import Run
from flows.showing import contents
from stages.reporting.book import Piece
from stages.reporting.excerpt import Excerpt, Picture

HIDDEN = "a\u202eb\x9b2J\x1b[2J\x7f\u2066c\u2028"
SHOWN = "a\\u202eb\\x9b2J\\x1b[2J\\x7f\\u2066c\\u2028"


def raw(text: str) -> list[str]:
    return [char for char in text if char in HIDDEN and not char.isprintable() and char != "\n"]


def test_a_prompt_in_an_artifact_of_prefect_is_escaped():
    picture = Picture(sample="s", prompt=f"{HIDDEN} | <b> a *dog*", seed=1, score=0.5, thumb="data:x")
    excerpt = Excerpt(k=0, pictures={"s": picture}, shown={"fixed": ("s",)})
    found = Collected(cast(Run, SimpleNamespace(url="/nowhere", plan=SimpleNamespace(baseline=0, first=0))))
    found.judged[0] = Piece(excerpt)
    grid = contents.pictures(found)
    assert raw(grid) == []
    assert "a\\u202eb\\x9b2J" in grid
    assert "b a dog" in grid


def test_the_conversion_of_weights_escapes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert native_weights.main([f"{HIDDEN}.pt", f"{tmp_path}/{HIDDEN}", "out"]) == 64
    assert SHOWN in (said := capsys.readouterr().err)
    assert raw(said) == []
    monkeypatch.setattr(native_weights, "import_weights", lambda *_: "0" * 64)
    assert native_weights.main([f"{HIDDEN}.pt", "base", "out"]) == 0
    assert raw(capsys.readouterr().out) == []
