"""Ranks that are unlike, and what ranks send each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.parallel.distributed import Group, require_alike
from tests.core.test_numerics import H100, L40S, torch_on
from tests.stages.ranks import start_ranks


def test_ranks_on_unlike_devices_are_refused_by_rank_and_device():
    ranks = [("n1", numerics(torch_on(H100))), ("n1", numerics(torch_on(H100))), ("n2", numerics(torch_on(L40S)))]
    require_alike(ranks[:2])
    with pytest.raises(ConfigError) as error:
        require_alike(ranks)
    assert str(error.value) == (
        "the ranks of one stage must have equal devices and numerics; "
        f"rank 2 ({L40S} on n2) differs from rank 0 ({H100} on n1): device: '{H100}' -> '{L40S}'. "
        "Give the stage nodes of one kind, e.g. by launch.ray.accelerator_type or launch.slurm.options"
    )
    assert error.value.exit_code == 64


def test_ranks_of_one_device_with_other_libraries_are_refused_too():
    with pytest.raises(ConfigError, match=r"rank 1 .*: cudnn_tf32: False -> True\."):
        require_alike([("n1", numerics(torch_on(H100))), ("n2", numerics(torch_on(H100, allow_tf32=True)))])
    on_cpu = numerics(torch)
    with pytest.raises(ConfigError, match=rf"rank 1 \(cpu on n2\) differs from rank 0 \({H100} on n1\)"):
        require_alike([("n1", numerics(torch_on(H100))), ("n2", on_cpu)])


def broadcast_a_layout() -> None:
    group, sizes = Group(60.0, Parallelism(world_size=3)), list[int]()
    gather = dist.all_gather

    def noted(found: list[torch.Tensor], tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        sizes.append(sum(one.numel() for one in found))
        return gather(found, tensor, *given, **named)

    dist.all_gather = noted
    layout = {"units": [[f"i0000-p-{number:016x}-000"] for number in range(10_000)], "é": None}
    assert group.broadcast(layout if group.rank == 0 else "mine") == layout
    assert group.broadcast([group.rank]) == [0]
    if group.rank == 0:
        with pytest.raises(TypeError, match="tuple"):
            group.broadcast((1,))
    group.close()
    assert sum(sizes) < 100, "buffers of each rank's size"


@pytest.mark.processes
def test_the_memory_for_the_layout_of_rank_0_does_not_grow_with_the_ranks(tmp_path: Path):
    start_ranks(broadcast_a_layout, tmp_path, 3, 60.0)
