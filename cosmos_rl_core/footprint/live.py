"""The bytes of all tensors that exist at the same time while torch computes."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counter of the memory of new tensors, as long as they exist; views share the memory of their base.

    Casts of the tensors ``own`` are not counted: autocast casts weights, and plans count these copies separately. The
    backward pass and its recomputed activations are counted like the forward pass.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        """Bytes at this moment, and the largest number so far."""
        # References to the tensors, so that no other memory can get their identity.
        self._own = {_identity(tensor): tensor for tensor in own}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and count the memory of its results."""
        # An operation that writes in place, or returns a view, makes no new memory.
        given = {_identity(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        made = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and _identity(args[0]) in self._own
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and _identity(tensor) not in given:
                self._count(tensor.untyped_storage(), counts=not is_cast)
        return made

    def _count(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
        identity = storage._cdata
        if identity in self._alive:
            return
        size = storage.nbytes() if counts else 0

        def ended(_: object) -> None:
            del self._alive[identity]
            self.now -= size

        self._alive[identity] = weakref.ref(storage, ended)
        self.now += size
        self.peak = max(self.peak, self.now)


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
