"""Artifacts on a real S3 server, through the node's copies."""

import secrets
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import cache, shards, store
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import read_entry, read_stored
from stages.artifacts.slots import input_of
from stages.formats.members import Members
from tests.hand_made import begin, make, report
from tests.seaweed import BUCKET

DATA = bytes(range(256)) * 1024


@pytest.fixture
def slot(seaweed) -> str:
    """A slot of its own."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}/slot"


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this node keeps its copies."""
    monkeypatch.setenv(cache.DIRECTORY, str(tmp_path / "copies"))
    return tmp_path / "copies"


def entry_url(slot, manifest, name):
    return store.join(slot, manifest.files[name].path)


def test_a_file_comes_from_the_nodes_copy_and_a_damaged_copy_from_the_store(slot, copies):
    manifest = make(report(slot), {"current/w": DATA, "note": b"small"})
    entry = manifest.files["current/w"]
    artifact = Artifact(input_of(slot))
    assert artifact.read("current/w") == DATA
    assert artifact.read("note") == b"small"
    assert (copies / entry.sha256).read_bytes() == DATA

    (copies / entry.sha256).write_bytes(DATA[:-1] + b"!")
    assert artifact.read("current/w") == DATA
    assert (copies / entry.sha256).read_bytes() == DATA

    store.remove(entry_url(slot, manifest, "current/w"))
    assert artifact.read("current/w") == DATA
    (copies / entry.sha256).unlink()
    with pytest.raises(ArtifactError, match="is missing; its manifest lists it"):
        artifact.read("current/w")


def test_damage_in_the_store_is_an_error_and_never_becomes_a_copy(slot, copies):
    manifest = make(report(slot), {"current/w": DATA})
    store.write(entry_url(slot, manifest, "current/w"), DATA[:-1] + b"!")
    for _ in range(2):
        with pytest.raises(ArtifactError, match="is not what was committed"):
            Artifact(input_of(slot)).read("current/w")
    assert not (copies / manifest.files["current/w"].sha256).exists()


def test_a_read_of_the_store_ignores_the_nodes_copy(slot, copies):
    attempt = begin(report(slot), layout={"shards": [1]})
    attempt.finish(0, {"a": DATA})
    (entry,) = attempt.files.values()
    assert read_entry(slot, entry) == DATA
    store.write(store.join(slot, entry.path), DATA[:-1] + b"!")
    assert read_entry(slot, entry) == DATA
    with pytest.raises(ArtifactError, match="is not what was committed"):
        read_stored(slot, entry)
    with pytest.raises(ArtifactError, match="is not what was committed"):
        begin(report(slot), layout={"shards": [1]}).adopt(0)


def test_members_of_a_shard_come_from_the_copy_of_the_shard(slot, copies):
    members = {f"{number}.bin": bytes([number]) * 50_000 for number in range(3)}
    manifest = make(report(slot), {"samples/00000.tar": shards.pack(members)})
    found = Members(Artifact(input_of(slot)), kept_bytes=0)
    copy = copies / manifest.files["samples/00000.tar"].sha256
    assert found.read("samples/00000.tar", "0.bin") == members["0.bin"]
    store.write(entry_url(slot, manifest, "samples/00000.tar"), b"")
    assert found.read("samples/00000.tar", "1.bin") == members["1.bin"]

    store.write(entry_url(slot, manifest, "samples/00000.tar"), shards.pack(members))
    copy.write_bytes(b"!" * copy.stat().st_size)
    assert found.read("samples/00000.tar", "2.bin") == members["2.bin"]
    assert not copy.exists()
    assert found.read("samples/00000.tar", "1.bin") == members["1.bin"]
