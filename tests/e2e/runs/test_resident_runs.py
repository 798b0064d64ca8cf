"""A run whose processes stay between its stages, killed and finished, has the bytes of a run by forks."""

import psutil
import pytest

from tests.e2e.flow_process import Flows, require_same_run, require_untouched

RESIDENT = ("--set", "launch.device=cpu", "--set", "launch.resident_gb=1")
LAST_ROLLOUT = "iterations/0002/rollout"
PROGRAM = "stages.execution.warm.resident"


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_that_stays_and_goes_on_with_the_same_bytes(
    flows: Flows, reference: Flows
) -> None:
    flows.forget("iterations/0001/update", "iterations/0002", "report", "exports/0003")
    before = flows.manifests()
    run = flows.start(*RESIDENT)
    run.wait_until(lambda: flows.markers(LAST_ROLLOUT, 0))
    (stays,) = flows.running(PROGRAM)
    # It has served an update and an export before.
    assert stays.create_time() < (flows.root / "iterations/0001/update/manifest.1.json").stat().st_mtime
    run.kill()
    assert flows.nothing_is_left()
    flows.run(*RESIDENT)
    assert flows.nothing_is_left()
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert not psutil.pid_exists(stays.pid)
