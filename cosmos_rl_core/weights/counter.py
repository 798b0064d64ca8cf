"""Count a pipeline without its weights. Every component is built on the meta device from its ``config.json``.

The caller is :mod:`cosmos_rl_core.weights.counting`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from cosmos_rl_core import plugins
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._encoder import without_numbers
from cosmos_rl_core.pipelines import directories, sizes

META = torch.device("meta")


class FullTexts(TorchFunctionMode):
    """Mode in which all texts have ``num_tokens`` tokens without padding.

    Some transformers read the lengths of texts from a mask, which has no values on the meta device. In this mode
    ``tolist`` of a meta tensor returns ``num_tokens`` for each element.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer ``tolist``, and call everything else."""
        if func is Tensor.tolist and args[0].is_meta:
            return np.full(args[0].shape, self._num_tokens).tolist()
        return func(*args, **(kwargs or {}))


def shapes(path: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors of each component that has weights, by name. Shared tensors count once."""
    return {name: _shapes_of(_loading.empty(path, name)) for name in _loading.weighted_parts(path)}


def _shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    distinct = {id(tensor): (name, tuple(tensor.shape)) for name, tensor in module.state_dict(keep_vars=True).items()}
    return dict(distinct.values())


def forward_flops(
    path: str, size: tuple[int, int], frames: int, max_prompt_length: int, pictures: sizes.Pictures
) -> int:
    """Return the operations of one unguided forward pass of the transformer on one sample, counted by torch."""
    plugin = plugins.load_model(directories.adapter_name(path))
    model = plugin.load(path, (_loading.EMPTY_TRANSFORMER,), META)
    model.transformer.to(META)
    x_t = torch.empty(1, *model.latent_shape(size, frames), device=META)
    conditioning = without_numbers(path, 1, max_prompt_length, size, frames, [(h, w) for h, w in pictures], META)
    tokens = sizes.text_tokens(path, max_prompt_length)
    with torch.no_grad(), FullTexts(tokens), FlopCounterMode(display=False) as counter:
        model.velocity(x_t, torch.empty(1, device=META), conditioning)
    return counter.get_total_flops()
