"""A rank of an update reads the samples of its own micro-batches, checks every byte, and keeps few of them."""

import json
import shutil
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.storage import shards
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.request import Input
from stages.artifacts.slots import input_of
from stages.execution.context import Context
from stages.execution.outcome import Outcome
from stages.formats.sample_tensors import SampleTensors
from stages.formats.samples import key_of, unit_name
from tests.hand_made import NUMERICS, make, report
from tests.stages.ranks import start_ranks

NUM_SAMPLES, PER_SHARD, NUM_STATES, NUM_RANKS = 12, 2, 8, 2
STATE_BYTES = 2**16
IDS = [f"s{n:02d}" for n in range(NUM_SAMPLES)]
KEYS = [key_of(0, sample_id) for sample_id in IDS]
TOTAL_BYTES = NUM_SAMPLES * NUM_STATES * STATE_BYTES


def state_of(n: int, step: int) -> torch.Tensor:
    return torch.full((STATE_BYTES // 8, 2), float(n + 100 * step), device="cpu")


def members_of(n: int) -> dict[str, bytes]:
    tensors = {f"state.{step}": state_of(n, step) for step in range(NUM_STATES)}
    tensors["steps"] = torch.arange(NUM_STATES, device="cpu")
    return {f"{IDS[n]}.safetensors": to_bytes(tensors), f"{IDS[n]}.txt": b"text"}


@pytest.fixture
def rollout(tmp_path: Path) -> Input:
    """Six units of two samples, of eight states each."""
    files: dict[str, bytes] = {}
    for number in range(NUM_SAMPLES // PER_SHARD):
        numbers = range(PER_SHARD * number, PER_SHARD * (number + 1))
        rows = [{"sample_id": IDS[n], "noise_seed": n} for n in numbers]
        files[unit_name(contracts.INDEX, number)] = json.dumps(rows).encode()
        members = {name: data for n in numbers for name, data in members_of(n).items()}
        files[unit_name(contracts.TENSORS, number)] = shards.pack(members)
    make(report(str(tmp_path / "slot")), files)
    return input_of(str(tmp_path / "slot"))


def file_of(rollout: Input, shard: int) -> Path:
    return Path(rollout.url, Artifact(rollout).manifest.files[unit_name(contracts.TENSORS, shard)].path)


def test_stored_tensors_are_read_in_the_memory_of_a_shard_and_the_kept_reads(rollout: Input):
    samples, rng = SampleTensors([rollout], KEYS, kept_bytes=2 * STATE_BYTES), np.random.default_rng(0)
    tracemalloc.start()
    try:
        for n, step in rng.permutation([(n, step) for n in range(NUM_SAMPLES) for step in range(NUM_STATES)]).tolist():
            found = samples[KEYS[n]][f"state.{step}"]
            assert found.shape == (STATE_BYTES // 8, 2)
            assert found.unique().tolist() == [n + 100 * step]
            assert samples.row(KEYS[n])["noise_seed"] == n
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A shard as it is checked, twice what is kept, which tensors are made of; not the six shards.
    assert peak < PER_SHARD * NUM_STATES * STATE_BYTES + 8 * STATE_BYTES < TOTAL_BYTES / 3
    assert sorted(samples["0/s00"]) == [*(f"state.{step}" for step in range(NUM_STATES)), "steps"]
    assert samples["0/s00"]["steps"].tolist() == list(range(NUM_STATES))
    assert "history.0" not in samples["0/s00"]


def test_shards_of_other_ranks_are_not_read(rollout: Input):
    samples = SampleTensors([rollout], KEYS)
    for shard in range(1, NUM_SAMPLES // PER_SHARD):
        file_of(rollout, shard).unlink()
    assert torch.equal(samples["0/s01"]["state.3"], state_of(1, 3))
    with pytest.raises(ArtifactError, match=r"00001\.tar is missing; its manifest lists it"):
        samples["0/s02"]


def test_a_wrong_byte_anywhere_in_a_shard_is_found_before_its_tensors_are_used(rollout: Input):
    path = file_of(rollout, 0)
    data = bytearray(path.read_bytes())
    data[data.index(b"text")] ^= 1
    path.write_bytes(data)
    samples = SampleTensors([rollout], KEYS)
    with pytest.raises(ArtifactError, match="is not what was committed"):
        samples["0/s00"]
    # Also behind the end of what was committed, and where it can no longer be read at all.
    path = file_of(rollout, 1)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ArtifactError, match="is not what was committed"):
        samples["0/s02"]


def test_a_tensor_whose_bytes_change_later_is_refused_and_the_others_are_read(rollout: Input):
    samples = SampleTensors([rollout], KEYS, kept_bytes=0)
    steps = samples["0/s00"]["steps"]
    path = file_of(rollout, 0)
    data = bytearray(path.read_bytes())
    data[data.index(state_of(1, 5).numpy().tobytes()[:64])] ^= 1
    path.write_bytes(data)
    assert torch.equal(samples["0/s00"]["steps"], steps)
    assert torch.equal(samples["0/s01"]["state.4"], state_of(1, 4))
    with pytest.raises(ArtifactError, match=r"s01\.safetensors in .* is not what was committed"):
        samples["0/s01"]["state.5"]


def test_a_sample_that_no_rollout_holds_is_an_error_at_once(rollout: Input):
    with pytest.raises(ArtifactError, match="the rollouts hold no tensors of 1 samples"):
        SampleTensors([rollout], ["0/s00", "0/s99"])


def test_an_unreadable_shard_is_reported_as_damage(rollout: Input):
    path = file_of(rollout, 0)
    path.write_bytes(b"\xff" * 3000)
    with pytest.raises(ArtifactError, match=r"is not what was committed: sha256 .*, expected"):
        SampleTensors([rollout], KEYS)["0/s00"]


def test_equal_sample_ids_of_two_rollouts_name_different_samples(rollout: Input, tmp_path: Path):
    make(report(str(tmp_path / "other")), {"index/00000.json": b'[{"sample_id": "s00", "noise_seed": 7}]'})
    keys = [key_of(0, "s00"), key_of(1, "s00")]
    samples = SampleTensors([rollout, input_of(str(tmp_path / "other"))], keys)
    assert [samples.row(key)["noise_seed"] for key in keys] == [0, 7]


def read_together(folder: Path) -> None:
    """Read all samples from a store of this rank's own, and leave what was found."""
    group = Group(60.0, Parallelism(world_size=NUM_RANKS))
    slot = str(folder / f"store-{group.rank}" / "slot")
    attempt = Attempt(report(slot), NUMERICS, 1, "attempt")
    context = Context(attempt, group, Outcome(folder / f"outcome-{group.rank}", group.rank))
    try:
        samples = SampleTensors([input_of(slot)], KEYS, context=context)
        found: Any = [[float(samples[key][f"state.{step}"][0, 0]) for step in range(NUM_STATES)] for key in KEYS]
    except ArtifactError as error:
        found = str(error)
    folder.joinpath(f"read-{group.rank}.json").write_text(json.dumps(found))
    group.close()


def read_by_ranks(rollout: Input, folder: Path, damaged: list[tuple[int, int]]) -> list[Any]:
    """Return what each rank read, after the last byte of shards was changed, each given by rank and number.

    It is beyond the last member, so that only who reads the whole shard notices.
    """
    for rank in range(NUM_RANKS):
        shutil.copytree(rollout.url, folder / f"store-{rank}" / "slot")
    for rank, number in damaged:
        (path,) = folder.joinpath(f"store-{rank}").rglob(f"tensors/{number:05d}.tar")
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    start_ranks(partial(read_together, folder), folder, NUM_RANKS, timeout_s=120.0)
    return [json.loads(folder.joinpath(f"read-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.processes
def test_ranks_share_the_first_reading_of_shards_and_each_reads_all_samples(rollout: Input, tmp_path: Path):
    others = [(rank, n) for rank in range(NUM_RANKS) for n in range(NUM_SAMPLES // PER_SHARD) if n % NUM_RANKS != rank]
    found = read_by_ranks(rollout, tmp_path / "ranks", damaged=others)
    expected = [[float(n + 100 * step) for step in range(NUM_STATES)] for n in range(NUM_SAMPLES)]
    assert found == [expected] * NUM_RANKS


@pytest.mark.processes
def test_a_damaged_shard_that_one_rank_reads_is_an_error_of_all(rollout: Input, tmp_path: Path):
    first, second = read_by_ranks(rollout, tmp_path / "ranks", damaged=[(1, 3)])
    assert first == second
    assert "store-1/slot" in first
    assert "is not what was committed" in first
