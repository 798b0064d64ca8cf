"""What forks refer to stays: retention, `gc` and `delete` of the origin know of them."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.storage import store
from flows.garbage import delete
from flows.garbage.run import gc
from flows.lineage.forks import Fork, forks_of, note
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.generations import invalidate
from stages.artifacts.records import Dropped
from stages.artifacts.slots import current_of, drop, input_of, is_dropped
from tests.flows.by_hand import make_all, make_one
from tests.flows.forking.forked import begun, made
from tests.hand_made import planned

KEEPS = (
    ("num_iterations = 2", "num_iterations = 4\nckpt = { max_keep = 1 }"),
    ("n_generation = 4", "n_generation = 4\nkeep = { tensors = 1, media = 1 }"),
)
FASTER = ("train.optm_lr=2e-3",)


@pytest.fixture
def origin(recipe: Any, tmp_path: Path) -> Run:
    """A run of four iterations that keeps one optimizer's state and one rollout, at its second policy."""
    run = planned(recipe(*KEEPS), tmp_path, run_id="hand")
    make_all(run.going_to(2))
    return run


def whole(slot: str) -> bool:
    """Whether every file of the artifact of a slot can be read."""
    artifact = Artifact(input_of(slot))
    return all(artifact.read(name) for name in artifact.names())


def test_retention_keeps_the_parts_that_a_fork_reads(origin: Run) -> None:
    fork = begun(origin, 2, overrides=FASTER)
    make_all(origin)
    assert whole(fork.slots.policy(2))
    assert whole(origin.slots.policy(2))
    # The version after it has no fork.
    assert is_dropped(made(origin.slots.policy(3)), "old")
    make_all(fork)
    assert made(fork.slots.policy(4)).slot == fork.slots.policy(4)


def test_a_fork_of_a_policy_without_state_is_refused_and_usable_ones_are_named(origin: Run) -> None:
    make_all(origin)
    with pytest.raises(ConfigError, match=r"policy version 2 has lost old .*versions that have all: 0, 4"):
        begun(origin, 2)


def test_retention_of_a_fork_deletes_nothing_of_its_origin(origin: Run) -> None:
    fork = begun(origin, 2, overrides=FASTER)
    make_all(fork)
    assert whole(origin.slots.policy(2))
    assert not store.names(fork.slots.policy(2)) - {"manifest.1.json"}


def test_a_deletion_by_retention_that_meets_a_new_fork_is_taken_back(origin: Run) -> None:
    slot, asked = origin.slots.policy(2), [False, True]
    drop(slot, "old", held=lambda: asked.pop(0))
    assert store.read_if_exists(Dropped.url(slot, 1, "old")) is None
    assert whole(slot)


def test_files_of_an_ended_generation_stay_while_a_fork_refers_to_them(origin: Run) -> None:
    fork = begun(origin, 2, overrides=FASTER)
    update = origin.slots.policy(2)
    first = Artifact(input_of(update))
    invalidate(update, 1, "a test")
    make_one(requests.update(origin, 1), salt="otherwise")
    assert current_of(update)[0] == 2
    gc(origin.store_url, "hand", superseded=True, dry_run=False, older_than_h=0.0)
    assert whole(fork.slots.policy(2))
    delete.delete(origin.store_url, fork.plan.run_id)
    assert not [*forks_of(origin.url)]
    gc(origin.store_url, "hand", superseded=True, dry_run=False, older_than_h=0.0)
    assert store.size(store.join(update, first.entry("current/w").path)) is None
    assert whole(update)


def test_a_damaged_record_of_a_fork_is_reported(origin: Run) -> None:
    note(origin.url, Fork(run="some", at=0, references={}, holds=()))
    url = store.join(origin.url, "forks", "some.json")
    store.write(url, store.read(url)[:-3])
    with pytest.raises(ArtifactError, match=r"forks/some\.json is damaged"):
        list(forks_of(origin.url))
