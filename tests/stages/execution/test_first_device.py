"""What only a GPU can show; other tests compute on any device. ``make test-gpu`` runs it; it is skipped without one."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import use_tf32
from cosmos_rl_core.process_trees import kill_tree
from stages.execution.outcome import failure_of
from tests.stages.ranks import RanksFailed, start_ranks

HOLD = """
import sys, torch
kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
input()
"""
ENDS_S = 60.0


@pytest.fixture(autouse=True)
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device, which --device cuda chooses")
    return device


def test_the_record_names_the_device_and_its_libraries_and_no_cpu(gpu: torch.device):
    found = numerics(torch)
    assert found["device"] == torch.cuda.get_device_name(gpu)
    assert None not in (found["cuda"], found["cudnn"])
    assert (found["nccl"] is not None) == dist.is_nccl_available()
    assert not found.keys() & {"cpu", "cpu_capability"}


def test_float32_is_whole_by_default_and_rounded_where_tf32_is_chosen(gpu: torch.device):
    """Errors of products of 2048 terms and of a convolution, as shares of the largest value."""
    a, b = (torch.randn(2048, 2048, generator=torch.Generator().manual_seed(n), device="cpu") for n in (0, 1))
    image, kernel = a.view(1, 64, 256, 256), b[:64, :576].reshape(64, 64, 3, 3)
    exact = (a.double() @ b.double(), torch.nn.functional.conv2d(image.double(), kernel.double()))
    errors: dict[bool, list[float]] = {}
    try:
        for tf32 in (False, True):
            use_tf32(tf32)
            found = (a.to(gpu) @ b.to(gpu), torch.nn.functional.conv2d(image.to(gpu), kernel.to(gpu)))
            errors[tf32] = [
                float((ours.cpu() - true).abs().max() / true.abs().max())
                for ours, true in zip(found, exact, strict=True)
            ]
    finally:
        use_tf32(False)
    assert max(errors[False]) < 1e-5
    if torch.cuda.get_device_capability(gpu) >= (8, 0):
        assert min(errors[True]) > 1e-5


def test_an_exhausted_device_is_out_of_memory_and_leaves_it_usable(gpu: torch.device):
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46, dtype=torch.uint8, device=gpu)
    assert failure_of(caught.value).kind == "out_of_memory"
    assert torch.ones(3, device=gpu).sum().item() == 3


def test_the_memory_of_a_killed_process_is_free_when_the_kill_returns(gpu: torch.device):
    free, _ = torch.cuda.mem_get_info(gpu)
    wanted = int(0.9 * free)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(wanted)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None
        assert held.stdout.readline() == b"held\n"
        assert torch.cuda.mem_get_info(gpu)[0] < free - wanted + 2**28
        kill_tree(held.pid)
        assert torch.cuda.mem_get_info(gpu)[0] > free - 2**30


def fail_during_a_sum() -> None:
    """Rank 1 runs out of memory while rank 0 waits for it in a sum over NCCL."""
    group = Group(ENDS_S, Parallelism(world_size=2))
    if group.rank == 1:
        raise MemoryError("the second rank says why")
    group.all_reduce_sum_(torch.ones(2**20, device=group.device)).sum().item()


def test_a_rank_that_fails_within_a_sum_over_nccl_ends_the_other_one(gpu: torch.device, tmp_path: Path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, one for each rank")
    with pytest.raises(RanksFailed, match="the second rank says why"):
        start_ranks(partial(fail_during_a_sum), tmp_path, ranks=2, timeout_s=2 * ENDS_S, gpus=True)
