"""Garbage: what a killed attempt left goes; what an artifact holds, or a retry would adopt, stays."""

import pytest

from cosmos_rl_core import store
from cosmos_rl_core.errors import LeaseError
from flows.gc import gc
from flows.requests import Run
from flows.rerun import rerun
from flows.status import states
from flows.steps import open_run
from stages.artifacts import Artifact, input_of
from tests.flows.by_hand import make_one, whole_run
from tests.hand_made import begin, make_run

LITTER = b"12345"


def litter(slot: str) -> str:
    """A file of an attempt that was killed before it committed."""
    store.write(f"{slot}/attempts/dead/current/00000.safetensors", LITTER)
    return f"{slot}/attempts/dead/current/00000.safetensors"


def require_whole(run: Run) -> None:
    for state in states(open_run(run.store_url, "hand")):
        assert state.word == "stands"
        artifact = Artifact(input_of(state.step.slot))
        assert all(artifact.read(name) for name in artifact.names())


def collect(run: Run, *, superseded: bool = False, dry_run: bool = False) -> list[str]:
    return gc(run.store_url, "hand", superseded=superseded, dry_run=dry_run).lines()


def test_a_clean_run_has_none(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    before = store.files(run.url)
    assert collect(run, superseded=True) == [f"nothing to delete in {run.url}"]
    assert {name for name in store.files(run.url) if not name.startswith("lease/")} == set(before)


def test_files_of_dead_attempts_are_said_and_then_deleted(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    before = set(store.files(run.url))
    places = [litter(run.policy_slot), litter(run.iteration(1, "rollout"))]
    said = collect(run, dry_run=True)
    assert [line.split()[0] for line in said] == ["policy", "iteration-0001/rollout", "would"]
    assert all(store.size(place) == len(LITTER) for place in places)
    assert collect(run)[-1] == "freed 0.0 MB"
    assert {name for name in store.files(run.url) if not name.startswith("lease/")} == before
    require_whole(run)


def test_finished_shards_of_an_unfinished_generation_stay(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    attempt = begin(run.rollout(1), layout={"shards": 2})
    attempt.shard(0, lambda: {"0.tar": b"finished"})
    attempt.put("1.tar", LITTER)
    assert collect(run)[:-1] == [f"{'iteration-0001/rollout':<28} {1:>6} files {0.0:>12.1f} MB"]
    retry = begin(run.rollout(1), layout={"shards": 2})
    retry.shard(0, lambda: pytest.fail("the finished shard is gone"))
    assert retry.read("0.tar") == b"finished"


def test_ended_generations_go_when_asked_for_and_their_manifests_stay(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    slot = run.iteration(0, "reward-jpeg")
    (old,) = [name for name in store.files(slot) if name.startswith("attempts/")]
    rerun(run.store_url, "hand", "reward-jpeg", 0)
    make_one(next(request for request in run.rewards(run.iteration(0, "rollout"), 0) if request.slot == slot))
    assert collect(run) == [f"nothing to delete in {run.url}"]
    assert "iteration-0000/reward-jpeg" in collect(run, superseded=True)[0]
    assert store.size(f"{slot}/{old}") is None
    assert store.size(f"{slot}/manifest.1.json") is not None
    require_whole(run)


def test_it_is_refused_while_a_process_works_on_the_run(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    place = litter(run.policy_slot)
    with run.lease(), pytest.raises(LeaseError, match="another process works on"):
        collect(run)
    assert store.size(place) == len(LITTER)
