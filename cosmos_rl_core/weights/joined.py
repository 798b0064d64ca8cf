"""Two adapters on one transformer, joined into one adapter whose ranks are the sums of theirs."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.weights import lora

Adapter = tuple[LoraConfig, Mapping[str, Tensor]]
"""The settings of an adapter, and its tensors by name."""


class Joined(Mapping[str, Tensor]):
    """The float32 tensors of the sum of two adapters, each computed when it is read.

    ``B_1 A_1 s_1 + B_2 A_2 s_2`` is one product, of ``[s_1 B_1, s_2 B_2]`` and ``[A_1; A_2]``. A module that only one
    adapter adapts keeps the rank of that adapter.
    """

    def __init__(self, below: Adapter, above: Adapter) -> None:
        self._adapters = (below, above)
        names = [{name.rpartition(".lora_")[0] for name in tensors} for _, tensors in self._adapters]
        self.config = lora.joined(below[0], above[0], names[0], names[1])
        """The settings of the sum."""

    def __getitem__(self, name: str) -> Tensor:
        module, _, side = name.rpartition(".lora_")
        is_a = side.startswith("A.")
        parts = [
            tensors[name].float() * (1.0 if is_a else lora.scale(config, module))
            for config, tensors in self._adapters
            if name in tensors
        ]
        if not parts:
            raise KeyError(name)
        return torch.cat(parts, dim=0 if is_a else 1)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({name for _, tensors in self._adapters for name in tensors}))

    def __len__(self) -> int:
        return sum(1 for _ in self)
