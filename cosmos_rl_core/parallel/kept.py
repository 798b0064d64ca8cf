"""Frozen modules that this process keeps from one stage to the next, up to a number of bytes.

A stage gets a new module each time, whose weights share the memory of the kept ones. So adapters, hooks and casts of
one stage never reach the next. Before the weights themselves are trained, :meth:`KeptModules.own` must be called.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cosmos_rl_core.parallel.checksums import checksums
from cosmos_rl_core.pipelines.modules import align, read_module, straight_to

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


@dataclass
class _Kept:
    """A module, and the modules that share its weights."""

    module: nn.Module
    sums: dict[str, int]
    """Checksums of its tensors when they were last known to be right."""
    sharing: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = field(default_factory=WeakKeyDictionary)
    """Modules that are still in use, with their weights in the order of its own."""

    def share(self) -> nn.Module:
        """Return a copy whose weights share memory with its own. Buffers, which code may set, are copied."""
        weights = list(self.module.parameters())
        shared = [nn.Parameter(weight.detach(), requires_grad=weight.requires_grad) for weight in weights]
        module = copy.deepcopy(self.module, {id(mine): its for mine, its in zip(weights, shared, strict=True)})
        self.sharing[module] = shared
        return module


class KeptModules:
    """Modules by their source; the one that was used longest ago comes first."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        """Most bytes of weights and buffers that are kept; 0 keeps nothing."""
        self._kept: dict[Key, _Kept] = {}
        self._form = ""

    @contextmanager
    def form(self, name: str) -> Iterator[None]:
        """Name the form, such as a cast (:meth:`adopt`), of modules requested in the block; each form is kept apart."""
        before, self._form = self._form, name
        try:
            yield
        finally:
            self._form = before

    def get(self, source: Source, read: Callable[[], nn.Module]) -> nn.Module:
        """Return a module that shares the weights kept for ``source``; if none are kept, the module from ``read``.

        A module that was read is kept if it fits the limit. The least recently used modules make room for it.
        """
        if self.limit_bytes == 0:
            return read()
        key = (*source.key, self._form)
        kept = self._kept.pop(key, None)
        if kept is None:
            module = read()
            if (needed := bytes_of(module)) > self.limit_bytes:
                return module
            while self.num_bytes + needed > self.limit_bytes:
                del self._kept[next(iter(self._kept))]
            kept = _Kept(module, checksums(_tensors_of(module)))
        self._kept[key] = kept
        return kept.share()

    def own(self, module: nn.Module) -> None:
        """Make a module the only owner of its weights, so that it may change them. They are no longer kept."""
        for key, kept in list(self._kept.items()):
            if module in kept.sharing:
                del self._kept[key]
                if len(kept.sharing) > 1:
                    for weight in kept.sharing[module]:
                        weight.data = weight.data.clone()

    def adopt(self, module: nn.Module) -> None:
        """Keep the present weights of a module, for example after a cast, in place of the weights that it was given."""
        for kept in self._kept.values():
            pairs = zip(kept.module.parameters(), kept.sharing.get(module, ()), strict=False)
            if others := [(mine, its) for mine, its in pairs if mine.data_ptr() != its.data_ptr()]:
                for mine, its in others:
                    mine.data = its.data
                kept.sums = checksums(_tensors_of(kept.module))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all kept weights and buffers."""
        return sum(bytes_of(kept.module) for kept in self._kept.values())

    @property
    def tensors(self) -> list[Tensor]:
        """Return all kept weights and buffers."""
        return [tensor for kept in self._kept.values() for tensor in _tensors_of(kept.module).values()]

    def changed(self) -> list[str]:
        """Return the names of kept tensors whose checksums have changed. Reads all kept tensors."""
        return [
            f"{key[0].__name__}.{name}"
            for key, kept in self._kept.items()
            for name, found in checksums(_tensors_of(kept.module)).items()
            if found != kept.sums[name]
        ]

    def clear(self) -> None:
        """Forget all kept modules."""
        self._kept.clear()


KEPT = KeptModules()
"""The modules that this process keeps."""


def frozen(cls: Any, folder: str | Path, where: str, device: torch.device, **options: Any) -> Any:
    """Return a module of the class ``cls`` with the weights in ``folder``, on ``device``, frozen, in eval mode.

    It is read straight to the device, unless :data:`KEPT` has it. Takes ``options`` and raises errors like
    :func:`cosmos_rl_core.pipelines.modules.read_module`.
    """
    reading = {**straight_to(device), **options}

    def read() -> nn.Module:
        module = read_module(cls, folder, where, **reading).requires_grad_(False).eval().to(device)
        align(module)
        return module

    return KEPT.get(Source(cls, Path(folder), {"device": device, **reading}), read)


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of a module's weights and buffers; tensors that are tied count once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_of(module).values())


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return weights, buffers, and tensors that are plain attributes, such as tables of positions."""
    plain = {
        f"{name}.{attribute}": value
        for name, part in module.named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, Tensor)
    }
    return {**dict(module.named_parameters()), **dict(module.named_buffers()), **plain}
