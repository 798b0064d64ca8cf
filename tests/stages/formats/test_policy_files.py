"""How ranks share the writing and the reading of a policy's files."""

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.sharding import Shards
from cosmos_rl_core.weights.parts import CURRENT, EMA
from cosmos_rl_core.weights.policy_weights import PolicyWeights, to_bytes
from stages.artifacts.attempt import Attempt
from stages.artifacts.slots import input_of
from stages.execution.context import Context
from stages.execution.outcome import Outcome
from stages.formats.policies import load_part, read_part, write_part
from tests.hand_made import NUMERICS, make, report
from tests.stages.ranks import start_ranks

NUM_FILES, NUM_RANKS = 5, 2
PATIENCE_S = 30.0


@dataclass(frozen=True)
class OneFileEach(Shards):
    """Tensors that count as a gibibyte each, so that each is a file of its own, and that all ranks gather together."""

    def shape(self, name: str, local: Tensor) -> tuple[int, ...]:
        return (2**28,)

    def whole(self, name: str, local: Tensor) -> Tensor:
        dist.barrier()
        return local


class MeetingAttempt(Attempt):
    """An attempt whose rank, while it writes a file, waits until the other rank writes the next file."""

    def put(self, name: str, data: bytes) -> None:
        index, folder = int(Path(name).stem), Path(self.request.slot).parent
        folder.joinpath(f"writing-{index}").touch()
        other = index ^ 1
        deadline_s = time.monotonic() + PATIENCE_S
        while other < NUM_FILES and not folder.joinpath(f"writing-{other}").exists():
            assert time.monotonic() < deadline_s, f"nobody writes file {other} next to file {index}"
            time.sleep(0.01)
        super().put(name, data)


def write(folder: Path) -> None:
    group = Group(60.0, Parallelism(world_size=NUM_RANKS))
    attempt = MeetingAttempt(report(str(folder / "slot")), NUMERICS, 1, "attempt")
    context = Context(attempt, group, Outcome(folder / f"outcome-{group.rank}", group.rank))
    tensors = {f"w{n}": torch.full((3,), float(n), device="cpu") for n in range(NUM_FILES)}
    write_part(context, CURRENT, tensors=tensors, shards=OneFileEach())
    folder.joinpath(f"written-{group.rank}").write_text(" ".join(sorted(attempt.files)))
    group.close()


@pytest.mark.processes
def test_ranks_write_files_side_by_side_and_each_file_once(tmp_path: Path):
    start_ranks(partial(write, tmp_path), tmp_path, NUM_RANKS, timeout_s=120.0)

    names = [f"{CURRENT}/{n:05d}.safetensors" for n in range(NUM_FILES)]
    assert [tmp_path.joinpath(f"written-{rank}").read_text().split() for rank in range(2)] == [names[::2], names[1::2]]
    for n, name in enumerate(names):
        found = load_tensors(tmp_path.joinpath("slot/attempts/attempt", name).read_bytes())
        assert {key: tensor.tolist() for key, tensor in found.items()} == {f"w{n}": [float(n)] * 3}
    assert '"phase":"writing current","step":5,"total":5' in tmp_path.joinpath("outcome-0/status.json").read_text()


def test_reading_a_part_reports_progress_by_tensor_and_file(tmp_path: Path):
    slot, told = str(tmp_path / "slot"), list[tuple[str, int, int]]()
    files = {
        f"current/{n:05d}.safetensors": to_bytes({f"{n}.{w}": torch.ones(2, device="cpu") for w in "ab"})
        for n in range(2)
    }
    make(report(slot), files)
    read = read_part(input_of(slot), "current", progress=lambda *step: told.append(step))
    assert sorted(read) == ["0.a", "0.b", "1.a", "1.b"]
    assert told == [("reading current", step, 2) for step in (0, 0, 1, 1, 1, 2)]


def test_a_part_is_copied_into_weights(tmp_path: Path):
    slot, values = str(tmp_path / "slot"), {"a": torch.full((2,), 3.0), "b": torch.full((3, 1), 4.0)}
    make(report(slot), {"current/00000.safetensors": to_bytes(values)})
    weights = PolicyWeights({name: nn.Parameter(torch.zeros_like(value)) for name, value in values.items()})
    weights.create(EMA)
    load_part(weights, input_of(slot), CURRENT, into=EMA)
    assert not any(tensor.any() for tensor in weights.here(CURRENT).values())
    load_part(weights, input_of(slot), CURRENT)
    for part in (CURRENT, EMA):
        assert all(torch.equal(weights.here(part)[name], value) for name, value in values.items())


def test_a_part_of_other_weights_is_refused_and_an_optional_part_may_be_absent(tmp_path: Path):
    slot = str(tmp_path / "slot")
    make(report(slot), {"current/00000.safetensors": to_bytes({"a": torch.ones(2), "c": torch.ones(2)})})
    weights = PolicyWeights({name: nn.Parameter(torch.zeros(2)) for name in "ab"})
    with pytest.raises(ArtifactError, match=r"not weights of this model: 2 differ, e\.g\. b is None, expected"):
        load_part(weights, input_of(slot), CURRENT)
    load_part(weights, input_of(slot), EMA, optional=True)
    with pytest.raises(ArtifactError, match=r"not weights of this model: 2 differ, e\.g\. a is None, expected"):
        load_part(weights, input_of(slot), EMA)


def read_shared(folder: Path) -> None:
    """Read the part from a store of this rank's own, and leave what was found."""
    group = Group(60.0, Parallelism(world_size=NUM_RANKS))
    try:
        tensors = read_part(input_of(str(folder / f"store-{group.rank}" / "slot")), CURRENT, group=group)
        found = {name: tensor.tolist() for name, tensor in tensors.items()}
    except ArtifactError as error:
        found = str(error)
    folder.joinpath(f"read-{group.rank}.json").write_text(json.dumps(found))
    group.close()


def read_by_ranks(folder: Path, damaged: list[tuple[int, int]]) -> list[Any]:
    """Return what each rank read, after files were damaged, each given by rank and number."""
    files = {f"current/{n:05d}.safetensors": to_bytes({f"w{n}": torch.full((3,), float(n))}) for n in range(NUM_FILES)}
    for rank in range(NUM_RANKS):
        make(report(str(folder / f"store-{rank}" / "slot")), files)
    for rank, n in damaged:
        (path,) = folder.joinpath(f"store-{rank}").rglob(f"{n:05d}.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    start_ranks(partial(read_shared, folder), folder, NUM_RANKS, timeout_s=120.0)
    return [json.loads(folder.joinpath(f"read-{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.processes
def test_each_rank_reads_its_share_of_a_parts_files_and_has_all_tensors(tmp_path: Path):
    others = [(rank, n) for rank in range(NUM_RANKS) for n in range(NUM_FILES) if n % NUM_RANKS != rank]
    found = read_by_ranks(tmp_path, damaged=others)
    assert found == [{f"w{n}": [float(n)] * 3 for n in range(NUM_FILES)}] * NUM_RANKS


@pytest.mark.processes
def test_damage_that_one_rank_finds_is_raised_on_all(tmp_path: Path):
    first, second = read_by_ranks(tmp_path, damaged=[(1, 3)])
    assert first == second
    assert "store-1/" in first
    assert "00003.safetensors is not what was committed" in first
