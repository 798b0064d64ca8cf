"""A transformer to sample with whose matrices rest in the half type that they are computed with.

Autocast casts exactly the weights of linear and convolution modules, each time anew. Where nothing trains them they may
as well be kept cast: half the memory, the same products. Modules that compute in float32 all the same
(:mod:`cosmos_rl_core.parallel.precision`) rest in float32.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.models import _loading
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in, float32_modules, half, keep_float32
from cosmos_rl_core.parallel.sharding import WHOLE, load_base, materialise, matrix_names


def load(path: str, param_dtype: ParamDtype, device: torch.device) -> nn.Module:
    """The transformer of the pipeline directory ``path``, on ``device``, computing in ``param_dtype``, a half type.

    It is read a tensor at a time. Whatever type a stock pipeline gives it, it takes float32 and returns a tuple of
    float32 tensors, as in rollouts: some of these modules hand on the type that they are given.
    """
    transformer = _loading.empty_transformer(path)
    keep_float32(transformer)
    kept = {weight for module in float32_modules(transformer) for weight in module.parameters()}
    for weight in map(transformer.get_parameter, matrix_names(transformer)):
        if weight not in kept:
            weight.data = weight.data.to(half(param_dtype))
    materialise(transformer, device)
    load_base(transformer, path, WHOLE)
    forward = transformer.forward

    @wraps(forward)
    def computed(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        named["return_dict"] = False
        with computes_in(param_dtype, device):
            answers = forward(*map(_whole, arguments), **{name: _whole(value) for name, value in named.items()})
            return tuple(map(_whole, answers))

    transformer.forward = computed
    return transformer


def _whole(value: Any) -> Any:
    """In float32, if it is a tensor of another floating type."""
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
