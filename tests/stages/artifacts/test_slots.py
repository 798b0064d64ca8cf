"""Parts of old policies that are let go of."""

import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import drop, input_of, why_stale
from tests.hand_made import make, remove
from tests.stages.artifacts.test_artifacts import already, policy


@pytest.fixture
def slot(store_url):
    return store.join(store_url, "slot")


def test_reading_a_dropped_part_is_an_error_and_the_artifact_stays_current(slot):
    files = {"current/w": b"c", "optimizer/m": b"1", "old/w": b"o"}
    manifest = make(policy(slot), files)
    source = input_of(slot)
    drop(slot, "optimizer", "old")
    drop(slot, "optimizer", "old")
    assert already(policy(slot)) == manifest
    assert input_of(slot) == source
    artifact = Artifact(source)
    assert artifact.read("current/w") == b"c"
    with pytest.raises(
        ArtifactError,
        match=r"optimizer/m of .* was deleted, because this run keeps the newest optimizer only; .*train.ckpt.max_keep",
    ):
        artifact.read("optimizer/m")
    assert [name for name in files if store.size(store.join(slot, manifest.files[name].path)) is not None] == [
        "current/w"
    ]
    remove(store.join(slot, manifest.files["current/w"].path))
    assert "current/w is missing" in (why_stale(manifest, policy(slot)) or "")


def test_an_interrupted_drop_is_finished_by_the_next_one(slot):
    manifest = make(policy(slot), {"current/w": b"c", "optimizer/m": b"1", "optimizer/n": b"2"})
    drop(slot, "optimizer")
    store.write(store.join(slot, manifest.files["optimizer/n"].path), b"2")
    drop(slot, "optimizer")
    assert store.size(store.join(slot, manifest.files["optimizer/n"].path)) is None
