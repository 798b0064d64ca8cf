"""How ranks share the writing of a policy's files."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load as load_tensors
from torch import Tensor

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.sharding import Shards
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import to_bytes
from stages.artifacts.attempt import Attempt
from stages.artifacts.slots import input_of
from stages.execution.context import Context
from stages.execution.outcome import Outcome
from stages.formats.policies import read_part, write_part
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
    """An attempt whose rank, while it writes a file, waits until the other rank writes the file beside it."""

    def put(self, name: str, data: bytes) -> None:
        index, folder = int(Path(name).stem), Path(self.request.slot).parent
        folder.joinpath(f"writing-{index}").touch()
        beside = index ^ 1
        deadline_s = time.monotonic() + PATIENCE_S
        while beside < NUM_FILES and not folder.joinpath(f"writing-{beside}").exists():
            assert time.monotonic() < deadline_s, f"nobody writes file {beside} beside file {index}"
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
def test_ranks_write_files_side_by_side_each_once(tmp_path: Path):
    start_ranks(partial(write, tmp_path), tmp_path, NUM_RANKS, timeout_s=120.0)

    names = [f"{CURRENT}/{n:05d}.safetensors" for n in range(NUM_FILES)]
    assert [tmp_path.joinpath(f"written-{rank}").read_text().split() for rank in range(2)] == [names[::2], names[1::2]]
    for n, name in enumerate(names):
        found = load_tensors(tmp_path.joinpath("slot/attempts/attempt", name).read_bytes())
        assert {key: tensor.tolist() for key, tensor in found.items()} == {f"w{n}": [float(n)] * 3}
    assert '"phase":"writing current","step":5,"total":5' in tmp_path.joinpath("outcome-0/status.json").read_text()


def test_reading_a_part_is_told_by_tensor_and_file(tmp_path: Path):
    slot, told = str(tmp_path / "slot"), list[tuple[str, int, int]]()
    files = {
        f"current/{n:05d}.safetensors": to_bytes({f"{n}.{w}": torch.ones(2, device="cpu") for w in "ab"})
        for n in range(2)
    }
    make(report(slot), files)
    read = read_part(input_of(slot), "current", progress=lambda *step: told.append(step))
    assert sorted(read) == ["0.a", "0.b", "1.a", "1.b"]
    assert told == [("reading current", step, 2) for step in (0, 0, 1, 1, 1, 2)]
