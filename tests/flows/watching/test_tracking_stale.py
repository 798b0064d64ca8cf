"""The numbers of a run whose rollouts are made during updates."""

import contextlib
import json

from cosmos_rl_core.storage import store
from flows.planning.plan import METRICS_FILE
from flows.session import loop
from flows.watching.tracking import Tracker
from tests.flows.tracked import Killed, Waves, go
from tests.hand_made import planned


def test_a_stale_rollout_has_one_line_of_the_policy_before_the_update(recipe, tmp_path):
    path = recipe(("num_iterations = 2", "num_iterations = 3\nstaleness = 1"))
    run = planned(path, tmp_path, run_id="stale")
    go(run)
    lines = [json.loads(line) for line in store.read(store.join(run.url, METRICS_FILE)).splitlines()]
    rollouts = [(line["iteration"], line["step"]) for line in lines if line["stage"] == "rollout"]
    assert rollouts == [(0, 0), (1, 0), (2, 2)]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)


def test_the_file_is_written_after_an_update_during_which_a_rollout_ran(recipe, tmp_path):
    path = recipe(("num_iterations = 2", "num_iterations = 3\nstaleness = 1"))
    run = planned(path, tmp_path, run_id="stale")
    with Tracker(run, print) as tracker:
        with contextlib.suppress(Killed):
            loop.make(run, Waves(tracker, until="iteration-0001/reward-ocr").launch)
        # Before the tracker ends, which would write it too.
        lines = [json.loads(line) for line in store.read(store.join(run.url, METRICS_FILE)).splitlines()]
    assert "update" in {line["stage"] for line in lines}
