"""Frozen matrices that are stored in the half type of the computation: the same bits, half the bytes, no casts."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.families import Family, has_autocast, moved, tensors_of
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in, float32_modules
from cosmos_rl_core.parallel.sharding import matrix_names
from cosmos_rl_core.weights.half_weights import cast_frozen
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import prepare


class Casts(TorchDispatchMode):
    """Counts casts of tensors that lie where a frozen matrix lies."""

    def __init__(self, matrices: list[Tensor]) -> None:
        super().__init__()
        self.found = 0
        self._places = {matrix.data_ptr() for matrix in matrices}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._places:
            self.found += 1
        return func(*args, **(kwargs or {}))


def forward_and_backward(family: Family, param_dtype: ParamDtype, *, cast: bool) -> tuple[dict[str, Tensor], int, int]:
    """Return velocity and gradients of an adapter by name, the casts of frozen matrices, and the matrices' bytes."""
    model: Any = family.load("transformer")
    weights = prepare(model.transformer, LoraConfig(r=2))
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), 0.1))
    if cast:
        cast_frozen(model.transformer, param_dtype)
    kept = {weight for module in float32_modules(model.transformer) for weight in module.parameters()}
    matrices = [p for p in map(model.transformer.get_parameter, matrix_names(model.transformer)) if p not in kept]
    t = torch.tensor([0.3, 0.71234], device=family.device)
    with Casts(matrices) as casts, computes_in(param_dtype, family.device):
        velocity = model.velocity(family.noise, t, family.conditioning)
    velocity.square().mean().backward()
    found = {name: parameter.grad for name, parameter in weights.parameters.items() if parameter.grad is not None}
    return found | {"velocity": velocity.detach()}, casts.found, sum(matrix.nbytes for matrix in matrices)


def test_matrices_that_are_cast_once_give_the_bits_of_a_cast_in_every_forward(family: Family):
    if not has_autocast(family.device):
        pytest.skip("this device has no autocast")
    expected, casts_before, bytes_before = forward_and_backward(family, "bfloat16", cast=False)
    found, casts, num_bytes = forward_and_backward(family, "bfloat16", cast=True)
    assert found.keys() == expected.keys()
    assert len(found) > 1
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert casts_before > 0
    assert casts == 0
    assert num_bytes == bytes_before // 2


def test_in_float32_and_in_full_fine_tuning_nothing_is_cast(family: Family):
    model: Any = family.load("transformer")
    before = {name: parameter.data_ptr() for name, parameter in model.transformer.named_parameters()}
    cast_frozen(model.transformer.requires_grad_(False), "float32")
    cast_frozen(model.transformer.requires_grad_(True), "bfloat16")
    assert {name: parameter.data_ptr() for name, parameter in model.transformer.named_parameters()} == before
