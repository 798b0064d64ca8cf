"""Members of shards: read one by one, every byte checked, and never more of them in memory than was allowed."""

import io
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save

from cosmos_rl_core.canonical import canonical_json, sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import shards
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.files import LATEST, SMALL_BYTES, read_once
from stages.artifacts.pool import index_of
from stages.artifacts.records import FileEntry
from stages.artifacts.request import Input
from stages.artifacts.slots import input_of
from stages.formats.embeddings import Embeddings
from stages.formats.latents import Latents
from stages.formats.members import Members
from stages.formats.tables import to_parquet
from tests.hand_made import make, report

MEMBER_BYTES = 2**16
SHARDS = [{f"{letter}{n}": bytes([n]) * MEMBER_BYTES for n in range(4)} for letter in "ab"]


@pytest.fixture
def slot(tmp_path: Path) -> str:
    """Two shards, ``a`` and ``b``, of four members each."""
    make(
        report(str(tmp_path / "slot")),
        {f"{letter}.tar": shards.pack(s) for letter, s in zip("ab", SHARDS, strict=True)},
    )
    return str(tmp_path / "slot")


def members_of(slot: str, kept: int = 0) -> Members:
    """Keeps so many members."""
    return Members(Artifact(input_of(slot)), kept * MEMBER_BYTES)


def file_of(slot: str, shard: str) -> Path:
    return Path(slot, Artifact(input_of(slot)).manifest.files[shard].path)


def damage(slot: str, shard: str, member: str) -> None:
    path = file_of(slot, shard)
    data = bytearray(path.read_bytes())
    data[shards.members(io.BytesIO(data))[member].pieces[0].start] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kept", [0, 1, 3, 8])
def test_members_of_a_shard_are_read_in_any_order_and_repeatedly(slot: str, kept: int):
    members = members_of(slot, kept)
    for name in ("a0", "b3", "a0", "a2", "b3", "b1", "a0", "a1", "a0"):
        assert members.read(f"{name[0]}.tar", name) == SHARDS["ab".index(name[0])][name]


def test_the_first_read_of_a_shard_checks_all_of_it(slot: str):
    damage(slot, "a.tar", "a3")
    members = members_of(slot)
    with pytest.raises(ArtifactError, match="is not what was committed"):
        members.read("a.tar", "a0")
    assert members.read("b.tar", "b0") == SHARDS[1]["b0"]


def test_later_reads_of_a_shard_fetch_and_check_only_one_member(slot: str):
    members = members_of(slot)
    members.read("a.tar", "a0")
    damage(slot, "a.tar", "a3")
    assert members.read("a.tar", "a1") == SHARDS[0]["a1"]
    with pytest.raises(ArtifactError, match=r"a3 in .* is not what was committed: .* changed since this process read"):
        members.read("a.tar", "a3")
    file_of(slot, "a.tar").write_bytes(b"")
    with pytest.raises(ArtifactError, match="is not what was committed"):
        members.read("a.tar", "a1")


def test_only_the_members_read_last_are_kept_in_memory(slot: str):
    members = members_of(slot, kept=2)
    for name in ("a0", "a1", "a0", "a2"):
        members.read("a.tar", name)
    file_of(slot, "a.tar").unlink()
    assert [members.read("a.tar", name) for name in ("a2", "a0")] == [SHARDS[0]["a2"], SHARDS[0]["a0"]]
    with pytest.raises(ArtifactError, match="is missing; it was there"):
        members.read("a.tar", "a1")


def test_threads_that_share_the_members_read_the_same_and_keep_no_more(slot: str):
    members = members_of(slot, kept=3)
    names = [f"{letter}{n}" for letter in "ab" for n in range(4)] * 50

    def read(name: str) -> bytes:
        return members.read(f"{name[0]}.tar", name)

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(read, names)] == [SHARDS["ab".index(name[0])][name] for name in names]
    for name in ("a0", "a1", "a2", "a0"):
        read(name)
    file_of(slot, "a.tar").unlink()
    assert read("a1") == SHARDS[0]["a1"]
    # Only the last three are kept, however many threads there were.
    with pytest.raises(ArtifactError, match="is missing; it was there"):
        read("a3")


def test_a_member_that_is_not_there_is_named(slot: str):
    with pytest.raises(ArtifactError, match=r"a.tar of .* has no member 'b0'; it has 4 others"):
        members_of(slot).read("a.tar", "b0")


# ---- latents and embeddings

PER_SHARD, NUM_SHARDS = 4, 16
IDS = [f"i{n:02d}" for n in range(PER_SHARD * NUM_SHARDS)]


def tensor_of(n: int) -> torch.Tensor:
    return torch.full((MEMBER_BYTES // 4,), float(n), device="cpu")


def large_set(tmp_path: Path) -> Input:
    """Latents in sixteen shards of four."""
    table = pd.DataFrame(dict.fromkeys(("item_id", "prompt_id", "latents_id"), IDS))
    files = {
        f"latents/{k:05d}.tar": shards.pack(
            {f"i{n:02d}.safetensors": to_bytes({"latents": tensor_of(n)}) for n in range(4 * k, 4 * k + 4)}
        )
        for k in range(NUM_SHARDS)
    }
    index = to_parquet(table.assign(shard=[n // PER_SHARD for n in range(len(IDS))]))
    make(report(str(tmp_path / "latents")), files | {"index.parquet": index})
    return input_of(str(tmp_path / "latents"))


def peak_bytes(read: Callable[[str], torch.Tensor]) -> int:
    """Most memory in use while every tensor is read twice, each in random order; they are what was written."""
    rng, peak = np.random.default_rng(0), 0
    order = [int(n) for _ in range(2) for n in rng.permutation(len(IDS))]
    tracemalloc.start()
    try:
        for n in order:
            found = read(IDS[n])
            assert float(found[0]) == float(found[-1]) == n
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(("kept", "num_shards"), [(0, 3), (6, 5)])
def test_reading_latents_of_a_large_set_takes_the_memory_of_a_few_shards(kept: int, num_shards: int, tmp_path: Path):
    latents = Latents([large_set(tmp_path)], kept_bytes=kept * MEMBER_BYTES)
    assert peak_bytes(latents.__getitem__) < num_shards * PER_SHARD * MEMBER_BYTES


def test_reading_embeddings_of_a_large_set_takes_the_memory_of_the_kept_ones(tmp_path: Path):
    entries: dict[str, FileEntry] = {}
    for n, one in enumerate(IDS):
        data = save({"embeds": tensor_of(n)}, {"about": '{"lengths": {}}'})
        path = f"embeddings/key/{one}.safetensors"
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
        entries[one] = FileEntry(path=path, size=len(data), sha256=sha256(data))
    make(report(str(tmp_path / "slot")), {"index.json": canonical_json(index_of(entries))})
    source = input_of(str(tmp_path / "slot"))
    for kept in (0, 6):
        embeddings = Embeddings([source], IDS, kept_bytes=kept * MEMBER_BYTES)
        assert peak_bytes(lambda one, found=embeddings: found[one]["embeds"]) < (kept + 4) * MEMBER_BYTES
    with pytest.raises(ArtifactError, match="has no embedding of j; embed the prompts of this plan"):
        Embeddings([source], ["i00", "j"])


def test_a_small_file_is_read_once_for_readers_that_follow_each_other_soon(slot: str):
    artifact, name = Artifact(input_of(slot)), "a.tar"
    data, path = artifact.read(name), file_of(slot, name)
    with read_once():
        assert artifact.read(name) == data
        path.write_bytes(b"")
        assert artifact.read(name) == data
        with pytest.raises(ArtifactError):
            Members(artifact).read("a.tar", "a0")
    with pytest.raises(ArtifactError):
        artifact.read(name)


def test_only_a_few_small_files_are_kept_for_the_next_reader(tmp_path: Path):
    files = {f"{n}.bin": bytes([n]) for n in range(LATEST + 1)} | {"large.bin": bytes(SMALL_BYTES + 1)}
    make(report(str(tmp_path / "slot")), files)
    artifact = Artifact(input_of(str(tmp_path / "slot")))
    with read_once():
        for name in files:
            artifact.read(name)
            file_of(str(tmp_path / "slot"), name).write_bytes(b"")
        assert [artifact.read(f"{n}.bin") for n in range(1, LATEST + 1)] == [bytes([n]) for n in range(1, LATEST + 1)]
        for name in ("0.bin", "large.bin"):
            with pytest.raises(ArtifactError):
                artifact.read(name)
