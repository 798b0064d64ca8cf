"""The bytes of all tensors that are alive at one time."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within it, and most of them at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.counted: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in storages((args, kwargs)):
            # What was there before.
            self.counted.setdefault(storage._cdata, 0)
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in self.counted:
                self.counted[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.forget, storage._cdata)
        return out

    def forget(self, key: int) -> None:
        self.bytes -= self.counted.pop(key, 0)


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
