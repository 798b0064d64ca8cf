"""A second device for machines that have only one: tensors with the CPU's numbers that claim to be on another device.

On a CPU alone, code that forgets to move a tensor to the model's device works; here it fails as it would on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("lazy", 0)
"""The one that they claim: one that every build of torch knows, none initialises, and whose gradients it can take."""

_aten = torch.ops.aten
_MOVES = {_aten.copy_.default, _aten._to_copy.default, _aten._foreach_copy_.default}
"""What takes tensors of two devices."""
_INDEXES = {_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default}
"""What takes indices from the CPU, also on a GPU."""
_LISTS = {_aten.stack.default, _aten.cat.default}
"""What takes not even a single number from the CPU."""


class Elsewhere(Tensor):
    """A tensor on :data:`DEVICE` with true numbers, ``held``."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "Elsewhere":
        """Wrap a tensor of the CPU."""
        tensor = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        tensor.held = held
        return tensor

    @property
    def data(self) -> "Elsewhere":  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same numbers without gradient; another tensor's may be put in their place."""
        return Elsewhere(self.held)

    @data.setter
    def data(self, other: "Elsewhere") -> None:
        self.held = other.held

    def tolist(self) -> Any:
        """Also from a GPU, numbers come as Python's, by a copy that a dispatch mode sees."""
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        """As from a GPU: not without a move."""
        raise TypeError(f"can't convert a tensor on {self.device} to numpy; use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with what is held."""
        return _run(func, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """Inside it, what is made on :data:`DEVICE` or moved there has true numbers."""

    def __enter__(self) -> Any:
        """Let ``torch.tensor`` make its numbers on the CPU and move them, which can be seen from here."""
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        """Leave it as it was."""
        super().__exit__(*reason)
        torch._C._set_only_lift_cpu_tensors(self._lifted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with what is held."""
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    if there and func not in _MOVES:
        _check_together(func, args, tensors)
    asked = kwargs.get("device")
    to_there = bool(there) if asked is None else torch.device(asked) == DEVICE
    if asked is not None and to_there:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    wrappers = {id(tensor.held): tensor for tensor in there}
    found = func(*_held(args), **_held(kwargs))
    if func is _aten.copy_.default:
        return args[0]
    if not to_there:
        return found
    # In-place operations return what they are given.
    return tree_map_only(
        Tensor, lambda tensor: wrappers[id(tensor)] if id(tensor) in wrappers else Elsewhere(tensor), found
    )


def _held(values: Any) -> Any:
    return tree_map_only(Elsewhere, lambda tensor: tensor.held, values)


def _check_together(func: Any, args: Any, tensors: list[Tensor]) -> None:
    """As on a GPU, most often a single number, or the indices of a tensor, may come from the CPU, and nothing else."""
    checked = args[:1] if func in _INDEXES else tensors
    least = 0 if func in _LISTS else 1
    if any(not isinstance(tensor, Elsewhere) and tensor.ndim >= least for tensor in checked):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found cpu and another one")
