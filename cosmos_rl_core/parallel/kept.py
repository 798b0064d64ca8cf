"""Frozen modules that this process keeps from one stage to the next, up to a number of bytes.

A stage gets a new module each time, whose weights share the memory of the kept ones. Adapters, hooks and casts of one
stage so never reach the next. What trains a module's own weights first makes them its own (:meth:`KeptModules.own`).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from cosmos_rl_core.parallel.checksums import checksums

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Source:
    """The files and options that a module is read with."""

    cls: type[nn.Module]
    folder: Path
    options: Mapping[str, Any]

    @property
    def key(self) -> Key:
        """Return class, folder and options, and name, size and time of each file: equal for equal modules."""
        stats = sorted((path.name, path.stat()) for path in self.folder.iterdir() if path.is_file())
        files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        options = tuple(sorted((name, str(value)) for name, value in self.options.items()))
        return self.cls, str(self.folder), options, files


@dataclass(frozen=True)
class _Kept:
    module: nn.Module
    sums: dict[str, int]
    """Checksums of its tensors when it was read."""


class KeptModules:
    """Modules by their source; the one that was used longest ago comes first."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        """Most bytes of weights and buffers that are kept; 0 keeps nothing."""
        self._kept: dict[Key, _Kept] = {}
        self._sharing: WeakSet[nn.Module] = WeakSet()

    def get(self, source: Source, read: Callable[[], nn.Module]) -> nn.Module:
        """Return a module that shares the weights of the kept one of this source, else what ``read`` returns.

        What was read is kept if it fits the limit. Modules that were used longest ago make room for it.
        """
        if self.limit_bytes == 0:
            return read()
        kept = self._kept.pop(key := source.key, None)
        if kept is None:
            module = read()
            if (needed := bytes_of(module)) > self.limit_bytes:
                return module
            while self.num_bytes + needed > self.limit_bytes:
                del self._kept[next(iter(self._kept))]
            kept = _Kept(module, checksums(_tensors_of(module)))
        self._kept[key] = kept
        self._sharing.add(module := _sharing(kept.module))
        return module

    def own(self, module: nn.Module) -> None:
        """Give a module a copy of its weights if it shares those of a kept one."""
        if module in self._sharing:
            for weight in module.parameters():
                weight.data = weight.data.clone()
            self._sharing.discard(module)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all kept weights and buffers."""
        return sum(bytes_of(kept.module) for kept in self._kept.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Return all kept weights and buffers."""
        return [tensor for kept in self._kept.values() for tensor in _tensors_of(kept.module).values()]

    def changed(self) -> list[str]:
        """Return the names of kept tensors whose bits are not the ones that were read. Reads all of them."""
        return [
            f"{key[0].__name__}.{name}"
            for key, kept in self._kept.items()
            for name, found in checksums(_tensors_of(kept.module)).items()
            if found != kept.sums[name]
        ]

    def clear(self) -> None:
        """Keep nothing of what is kept now."""
        self._kept.clear()


KEPT = KeptModules()
"""What this process keeps."""


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's weights and buffers; tensors that are tied count once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(module).values())


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _sharing(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose weights share memory with its own. Buffers, which code may set, are copied."""
    shared = {
        id(weight): nn.Parameter(weight.detach(), requires_grad=weight.requires_grad) for weight in module.parameters()
    }
    return copy.deepcopy(module, shared)
