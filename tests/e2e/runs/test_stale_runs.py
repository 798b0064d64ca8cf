"""With staleness 1 the next rollout is sampled while the update runs: at once, and with the same bytes after kills.

The run is DDRL with media, so that what is made again has the diffusion loss in it.
"""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_of, input_of
from tests.e2e.flow_process import COLD, Flows, Started, current_manifests, require_untouched

pytestmark = pytest.mark.slow

RECIPE = "tests/e2e/stale.toml"
SLOTS = {"update": "iterations/0001/update", "rollout": "iterations/0002/rollout"}
"""The two sides of the second such wave, whose rollout is by a policy that was trained."""
ADOPTED = "of an earlier attempt adopted"


@pytest.fixture(scope="module")
def stale_reference(prefect_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Flows:
    """The run that nobody interrupted."""
    flows = Flows(tmp_path_factory.mktemp("stale"), prefect_environment, RECIPE)
    flows.run()
    assert flows.nothing_is_left()
    return flows


def hold_both(flows: Flows, run: Started) -> dict[str, psutil.Process]:
    """Both sides of the wave inside their work, suspended there: whichever comes first waits for the other."""
    reached: dict[str, Callable[[], object]] = {
        "update": lambda: flows.phases("update", "training"),
        "rollout": lambda: flows.markers(SLOTS["rollout"], 0),
    }
    held: dict[str, psutil.Process] = {}
    while len(held) < len(reached):
        run.wait_until(lambda: any(reached[stage]() for stage in reached.keys() - held.keys()))
        for stage in reached.keys() - held.keys():
            if reached[stage]():
                held[stage] = flows.worker(stage)
                held[stage].suspend()
    assert not [slot for slot in SLOTS.values() if list((flows.root / slot).glob("manifest.*.json"))]
    return held


def require_same_bytes(flows: Flows, reference: Flows) -> None:
    """Every artifact of the run has the reference's bytes, and the last policy can be read."""
    ours, theirs = current_manifests(flows), current_manifests(reference)
    assert {slot: m.content for slot, m in ours.items()} == {slot: m.content for slot, m in theirs.items()}
    policy = Artifact(input_of(flows.planned.slots.policy(3)))
    assert [policy.read(name) for name in policy.names("current/")]
    assert flows.nothing_is_left()


@pytest.mark.parametrize("killed", ["update", "rollout"])
def test_either_side_of_the_overlap_is_killed_and_tried_again_alone(
    killed: str, stale_reference: Flows, copy_of: Callable[[Flows], Flows]
) -> None:
    flows = copy_of(stale_reference)
    flows.forget(*SLOTS.values())
    before = flows.manifests()
    run = flows.start()
    sides = hold_both(flows, run)
    sides.pop(killed).kill()
    for other in sides.values():
        other.resume()

    said = run.finish()
    assert f"{SLOTS[killed].removeprefix('iterations/')} ended (killed, exit code -9)" in said
    assert (ADOPTED in said) == (killed == "rollout")
    tries = {stage: len(list((flows.root / slot / "logs").iterdir())) for stage, slot in SLOTS.items()}
    assert tries == {stage: 2 if stage == killed else 1 for stage in SLOTS}
    # The same bytes again, so that all that was made of them is current.
    require_untouched(flows, before)
    require_same_bytes(flows, stale_reference)


def test_media_whose_encoding_is_killed_are_encoded_on_and_nothing_is_made_twice(
    stale_reference: Flows, copy_of: Callable[[Flows], Flows]
) -> None:
    flows = copy_of(stale_reference)
    slot = flows.planned.prepared.encode.slot
    flows.forget(slot)
    before = flows.manifests()
    run = flows.start()
    run.wait_until(lambda: flows.markers(slot, 0))
    flows.worker("encode").kill()

    said = run.finish()
    assert "ended (killed, exit code -9)" in said
    assert ADOPTED in said
    ours, theirs = (current_of(one.planned.prepared.encode.slot)[1] for one in (flows, stale_reference))
    assert ours is not None
    assert theirs is not None
    assert ours.content == theirs.content
    assert flows.manifests() == before
    assert flows.nothing_is_left()


def test_the_flow_is_killed_while_both_sides_work(stale_reference: Flows, copy_of: Callable[[Flows], Flows]) -> None:
    flows = copy_of(stale_reference)
    flows.forget(SLOTS["update"], "iterations/0002", "exports/0003", "report")
    before = flows.manifests()
    run = flows.start(*COLD)
    for side in hold_both(flows, run).values():
        side.resume()
    run.kill()

    assert flows.nothing_is_left()
    assert flows.manifests() == before
    # Warm, because only the kill is the point here.
    assert ADOPTED in flows.run()
    require_untouched(flows, before)
    require_same_bytes(flows, stale_reference)


def test_the_rollout_during_an_update_is_by_the_policy_before_it(stale_reference: Flows) -> None:
    plan = stale_reference.planned
    assert plan.recipe.train.staleness == 1
    policies = [
        Artifact(input_of(plan.slots.iteration(k, "rollout"))).manifest.inputs["policy"][0].url for k in range(3)
    ]
    found = [Path(url).relative_to(stale_reference.root).as_posix() for url in policies]
    assert found == ["policy", "policy", "iterations/0000/update"]
