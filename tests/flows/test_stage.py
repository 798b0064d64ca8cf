"""One stage of a run, as a flow: what is refused before anything starts."""

from pathlib import Path
from typing import Any

from flows.stage import run as run_stage
from tests.hand_made import planned


def test_a_stage_comes_after_all_of_earlier_waves(recipe, tmp_path: Path):
    """A gap would be what an audit calls a loss."""
    run = planned(recipe(), tmp_path, run_id="hand")
    state: Any = run_stage.fn("hand", "update", 1, store=run.store_url)
    told = "iteration-0001/update comes after policy, which was not made yet; make that first, or continue the run"
    assert (state.is_failed(), state.message) == (True, told)
    unknown: Any = run_stage.fn("hand", "updat", 1, store=run.store_url)
    assert "did you mean 'update'?" in unknown.message
