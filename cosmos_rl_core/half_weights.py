"""A transformer to sample with whose matrices rest in the half type that they are computed with.

Autocast casts exactly the weights of linear and convolution modules, each time anew. Where nothing trains them they may
as well be kept cast: half the memory, the same products.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_rl_core.models import _loading
from cosmos_rl_core.precision import ParamDtype, computes_in, half
from cosmos_rl_core.sharding import WHOLE, load_base, materialise, matrix_names


def load(path: str, param_dtype: ParamDtype, device: torch.device) -> nn.Module:
    """The transformer of the pipeline directory ``path``, on ``device``, computing in ``param_dtype``, a half type.

    It is read a tensor at a time. What it returns is a tuple of float32 tensors, so that a stock pipeline keeps its
    latents in float32, as rollouts do.
    """
    transformer = _loading.empty_transformer(path)
    for name in matrix_names(transformer):
        weight = transformer.get_parameter(name)
        weight.data = weight.data.to(half(param_dtype))
    materialise(transformer, device)
    load_base(transformer, path, WHOLE)
    forward = transformer.forward

    @wraps(forward)
    def computed(*arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        with computes_in(param_dtype, device):
            return tuple(tensor.float() for tensor in forward(*arguments, **named | {"return_dict": False}))

    transformer.forward = computed
    return transformer
