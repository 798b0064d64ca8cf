"""What a process with torch records of itself once it is set up."""

import pytest

from cosmos_rl_core.precision import ParamDtype
from stages import torch_runtime


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_the_recorded_dtype_is_the_one_that_products_are_computed_in(param_dtype: ParamDtype):
    group = torch_runtime.start(threads=1, deterministic=True, timeout_s=60.0)
    found = torch_runtime.numerics(group, param_dtype)
    assert (found["compute_dtype"], found["default_dtype"]) == (param_dtype, "float32")
    assert (found["world_size"], found["attention_backend"]) == (1, "native")
