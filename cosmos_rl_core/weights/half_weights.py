"""Transformers whose frozen matrices are stored in the half type of the computation.

Autocast casts the weights of linear and convolution modules in every forward pass. Weights that do not train can be
stored already cast, which halves their memory and gives the same products. Modules that compute in float32
(:mod:`cosmos_rl_core.parallel.precision`) are stored in float32.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.models import _loading
from cosmos_rl_core.parallel import precision
from cosmos_rl_core.parallel.sharding import WHOLE, load_base, materialise, matrix_names


def load(path: str, param_dtype: precision.ParamDtype, device: torch.device) -> nn.Module:
    """Load the transformer of the pipeline directory ``path`` on ``device``; it computes in a half type.

    The weights are read one tensor at a time. The forward pass casts its inputs to float32 and returns a tuple of
    float32 tensors, like in rollouts, because some modules return the type of their input and a stock pipeline may pass
    another one.
    """
    transformer = _loading.empty_transformer(path)
    precision.keep_float32(transformer)
    cast_frozen(transformer.requires_grad_(False), param_dtype)
    materialise(transformer, device)
    load_base(transformer, path, WHOLE)
    forward = transformer.forward

    @wraps(forward)
    def computed(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        named["return_dict"] = False
        with precision.computes_in(param_dtype, device):
            answers = forward(*map(_whole, arguments), **{name: _whole(value) for name, value in named.items()})
            return tuple(map(_whole, answers))

    transformer.forward = computed
    return transformer


def cast_frozen(transformer: nn.Module, param_dtype: precision.ParamDtype) -> None:
    """Cast the frozen matrices that autocast would cast in every forward pass, one after the other, in place.

    Outputs and gradients keep their bits, because autocast would make the same cast. In float32 nothing is cast.
    """
    if (dtype := precision.half(param_dtype)) is None:
        return
    kept = {weight for module in precision.float32_modules(transformer) for weight in module.parameters()}
    for weight in map(transformer.get_parameter, sorted(matrix_names(transformer))):
        if weight not in kept and not weight.requires_grad:
            weight.data = weight.data.to(dtype)


def _whole(value: Any) -> Any:
    """Return floating-point tensors, also in lists, as float32, other values unchanged."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
