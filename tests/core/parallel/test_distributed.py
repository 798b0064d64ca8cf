"""Ranks that are unlike."""

import pytest
import torch

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.parallel.distributed import require_alike
from tests.core.test_numerics import H100, L40S, torch_on


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
