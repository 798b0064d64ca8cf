"""Characters that change a terminal or turn text around are escaped in JSON, in Prefect, and in errors of commands."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cosmos_rl_core.errors import ConfigError, StageError, StoppedError
from cosmos_rl_core.importers import native_weights
from flows.cli.base.printing import print_json
from flows.library.collected import Collected
from flows.planning.run import Run
from flows.session.session import ends_in_state
from flows.showing import contents
from stages.reporting.book import Piece
from stages.reporting.excerpt import Excerpt, Picture

HIDDEN = "a\u202eb\x9b2J\x1b[2J\x7f\u2066c\u2028"
SHOWN = "a\\u202eb\\x9b2J\\x1b[2J\\x7f\\u2066c\\u2028"


def raw(text: str) -> list[str]:
    return [char for char in text if char in HIDDEN and not char.isprintable() and char != "\n"]


def test_json_for_scripts_has_escapes_that_read_as_the_same_value(capsys: pytest.CaptureFixture[str]):
    value = {f"name {HIDDEN}": [HIDDEN, "é 日 \U0001f600", 'quotes " and \\u202e']}
    print_json(value)
    said = capsys.readouterr().out
    assert raw(said) == []
    assert json.loads(said) == value
    assert "\\u202eb\\u009b2J\\u001b[2J\\u007f\\u2066c\\u2028" in said
    assert "é 日 \U0001f600" in said


def test_a_prompt_in_an_artifact_of_prefect_is_escaped():
    picture = Picture(sample="s", prompt=f"{HIDDEN} | <b> a *dog*", seed=1, score=0.5, thumb="data:x")
    excerpt = Excerpt(k=0, pictures={"s": picture}, shown={"fixed": ("s",)})
    found = Collected(cast(Run, SimpleNamespace(url="/nowhere", plan=SimpleNamespace(baseline=0, first=0))))
    found.judged[0] = Piece(excerpt)
    grid = contents.pictures(found)
    assert raw(grid) == []
    assert "a\\u202eb\\x9b2J" in grid
    assert "b a dog" in grid


@pytest.mark.parametrize("kind", [ConfigError, StoppedError, StageError])
def test_the_message_of_a_state_in_prefect_is_escaped(kind: type[ConfigError]):
    @ends_in_state
    def failed() -> str:
        raise kind(f"no run {HIDDEN}")

    assert failed().message == f"no run {SHOWN}"


def test_the_message_of_a_completed_state_is_escaped():
    @ends_in_state
    def completed() -> str:
        return f"{HIDDEN} 0.1 -> 0.2"

    assert completed().message == f"{SHOWN} 0.1 -> 0.2"


def test_the_conversion_of_weights_escapes_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert native_weights.main([f"{HIDDEN}.pt", f"{tmp_path}/{HIDDEN}", "out"]) == 64
    assert SHOWN in (said := capsys.readouterr().err)
    assert raw(said) == []
    monkeypatch.setattr(native_weights, "import_weights", lambda *_: "0" * 64)
    assert native_weights.main([f"{HIDDEN}.pt", "base", "out"]) == 0
    assert raw(capsys.readouterr().out) == []
