"""What a process with torch records of itself once it is set up."""

import os

import pytest
import torch

from cosmos_rl_core.precision import ParamDtype
from stages import torch_runtime


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_the_recorded_dtype_is_the_one_that_products_are_computed_in(param_dtype: ParamDtype):
    group = torch_runtime.start(threads=1, deterministic=True, timeout_s=60.0)
    found = torch_runtime.numerics(group, param_dtype)
    assert (found["compute_dtype"], found["default_dtype"]) == (param_dtype, "float32")
    assert (found["world_size"], found["attention_backend"]) == (1, "native")


def test_deterministic_kernels_sum_in_a_stated_order_and_fill_no_buffers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    torch_runtime.start(threads=1, deterministic=False, timeout_s=60.0)
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    torch_runtime.start(threads=1, deterministic=True, timeout_s=60.0)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert not torch.utils.deterministic.fill_uninitialized_memory
