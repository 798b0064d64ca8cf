"""Several processes of `reward` that are killed: the next attempt ends with the bytes of an uninterrupted run."""

from pathlib import Path

import psutil
import pytest

from stages.artifacts.slots import current_of
from tests.e2e.flow_process import COLD, Flows, eventually, require_same_run, require_untouched

REWARD = "iterations/0002/reward-ocr"
TWO = (*COLD, "--set", "launch.stage_processes.reward=2")


def scorers(flows: Flows) -> list[psutil.Process]:
    """The processes that score, children of the stage's own."""
    return [one for one in flows.processes() if "--multiprocessing-fork" in one.cmdline()]


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["one that scores", "the stage itself"])
def test_a_killed_process_of_two_that_score_changes_no_bytes(killed: str, flows: Flows, reference: Flows) -> None:
    flows.forget(REWARD)
    before = flows.manifests()
    run = flows.start(*TWO)
    run.wait_until(lambda: len(scorers(flows)) == 2)
    first = scorers(flows)
    run.wait_until(lambda: flows.markers(REWARD, 0) or flows.markers(REWARD, 1))
    (first[0] if killed == "one that scores" else psutil.Process(first[0].ppid())).kill()
    said = run.finish()
    assert "another attempt follows" in said
    assert "of an earlier attempt adopted" in said
    assert eventually(lambda: not any(one.is_running() for one in first), 10)
    assert current_of(str(flows.root / REWARD))[1] is not None
    assert len([*Path(flows.root / REWARD / "logs").iterdir()]) == 2
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert flows.nothing_is_left()
