"""Numbers that a run of a VLM writes of its held-out conversations."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.canonical import canonical_json
from flows.watching.metrics import lines_of
from stages.artifacts.request import Input, Request
from stages.vlm.contracts import VlmEvaluate, VlmRef
from tests.hand_made import make


def numbers_of(folder: Path, most_tokens: int, **summary: Any) -> dict[str, Any]:
    """The numbers of policy 2 after 6 steps, from what its evaluation says of itself."""
    config = VlmEvaluate(
        vlm=VlmRef(path="m", digest="d"), lora=None, trains=("language",), sources={}, max_new_tokens=most_tokens
    )
    inputs = {
        name: (Input(url=name, generation=1, manifest="m", fingerprint="f", content="c"),)
        for name in ("policy", "tokens")
    }
    slot = str(folder / "policies/0002/validate")
    request = Request(stage="vlm_evaluate", slot=slot, seed=0, iteration=2, config=config, inputs=inputs)
    manifest = make(request, {VlmEvaluate.ANSWERS: canonical_json([])}, **summary)
    (line,) = lines_of(request, manifest, 6, "")
    assert (line.k, line.step, line.is_evaluation) == (2, 6, True)
    return line.values


ASKED = {"loss": 2.5, "standard_error": 0.25, "correct_mine": 0.75, "correct_mine_error": 0.125, "seconds": 3.0}


def test_the_held_out_loss_of_a_vlm_has_its_standard_error(tmp_path: Path):
    found = numbers_of(tmp_path, 0, loss=2.5, standard_error=0.25, seconds=3.0)
    expected = {"val/avg_loss": 2.5, "val/avg_loss_standard_error": 0.25, "val/seconds": 3.0}
    assert {name: value for name, value in found.items() if name.startswith("val/")} == expected


@pytest.mark.parametrize(("said", "expected"), [({"unfinished": 4}, 4), ({}, 0)])
def test_answers_that_were_cut_off_are_counted_also_if_there_are_none(
    tmp_path: Path, said: dict[str, int], expected: int
):
    found = numbers_of(tmp_path, 3, **ASKED, **said)
    assert found["val/unfinished"] == expected
    assert (found["val/correct_mine"], found["val/correct_mine_error"]) == (0.75, 0.125)


def test_answers_of_a_stage_that_did_not_count_them_have_no_such_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So the lines of a run from then are still those that its artifacts give."""
    monkeypatch.setattr(VlmEvaluate, "version", 3)
    found = numbers_of(tmp_path, 3, **ASKED)
    assert [name for name in found if name.startswith("val/")] == [
        "val/avg_loss",
        "val/correct_mine",
        "val/correct_mine_error",
        "val/seconds",
    ]
