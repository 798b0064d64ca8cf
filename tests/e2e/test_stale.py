"""With staleness 1 the next rollout is sampled beside the update: at once, and with the same bytes after kills."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.artifacts import Artifact, input_of
from tests.e2e.flow_process import COLD, Flows, Started, standing_manifests

RECIPE = "tests/e2e/stale.toml"
UPDATE, ROLLOUT = "iterations/0000/update", "iterations/0001/rollout"


@pytest.fixture(scope="module")
def stale_reference(prefect_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Flows:
    """The run that nobody interrupted."""
    flows = Flows(tmp_path_factory.mktemp("stale"), prefect_environment, RECIPE)
    flows.run()
    assert flows.nothing_is_left()
    return flows


def both_work(flows: Flows) -> bool:
    """Whether rollout 1 samples while update 0 has not ended."""
    return bool(flows.phases("rollout", "sampling")) and bool(flows.phases("update", "training"))


def worker(flows: Flows, stage: str) -> psutil.Process:
    """The rank that runs a stage."""
    ranks = [process for process in flows.processes() if "RANK" in process.environ()]
    return next(rank for rank in ranks if any(f"cosmos-flows-{stage}-" in word for word in rank.cmdline()))


def start(flows: Flows) -> Started:
    """Go on with the run up to where both stages work."""
    run = flows.start(*COLD)
    run.wait_until(lambda: both_work(flows))
    return run


def require_same_bytes(flows: Flows, reference: Flows) -> None:
    """Every artifact of the run has the reference's bytes."""
    ours, theirs = standing_manifests(flows), standing_manifests(reference)
    assert {slot: m.content for slot, m in ours.items()} == {slot: m.content for slot, m in theirs.items()}
    policy = Artifact(input_of(flows.planned.policy_after(2)))
    assert [policy.read(name) for name in policy.names("current/")]
    assert flows.nothing_is_left()


def copy_to_the_wave(reference: Flows, copy_of: Callable[[Flows], Flows]) -> Flows:
    """The run, back at its first update."""
    flows = copy_of(reference)
    flows.forget(UPDATE, "iterations/0001", "exports/0002", "report")
    return flows


@pytest.mark.parametrize("stage", ["update", pytest.param("rollout", marks=pytest.mark.slow)])
def test_either_side_of_the_overlap_is_killed_and_tried_again(
    stage: str, stale_reference: Flows, copy_of: Callable[[Flows], Flows]
) -> None:
    flows = copy_to_the_wave(stale_reference, copy_of)
    run = start(flows)
    assert not [slot for slot in (UPDATE, ROLLOUT) if list((flows.root / slot).glob("manifest.*.json"))]
    worker(flows, stage).kill()
    run.finish()
    require_same_bytes(flows, stale_reference)


@pytest.mark.slow
def test_the_flow_is_killed_while_both_sides_work(stale_reference: Flows, copy_of: Callable[[Flows], Flows]) -> None:
    flows = copy_to_the_wave(stale_reference, copy_of)
    start(flows).kill()
    assert flows.nothing_is_left()
    flows.run()
    require_same_bytes(flows, stale_reference)


def test_the_rollout_beside_an_update_is_by_the_policy_before_it(stale_reference: Flows) -> None:
    plan = stale_reference.planned
    assert plan.recipe.train.staleness == 1
    policies = [Artifact(input_of(plan.iteration(k, "rollout"))).manifest.inputs["policy"][0].url for k in range(2)]
    assert [Path(url).relative_to(stale_reference.root).as_posix() for url in policies] == ["policy", "policy"]
