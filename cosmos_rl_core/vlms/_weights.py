"""Weights of a VLM's folder, mapped from its files: all ranks of a machine share the pages that they read.

A rank has in memory the weights that it keeps and, of the files, only the tensor that it copies now.
"""

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_rl_core.parallel.sharding import Shards
from cosmos_rl_core.pipelines.modules import read_module
from cosmos_rl_core.storage.tensor_files import dtype_of
from cosmos_rl_core.storage.tensor_headers import read_header
from cosmos_rl_core.vlms._folders import weight_files

STORED = ("F32", "BF16", "F16")
"""Types of tensors that are mapped as they are stored. If files have another type, or several types, their tensors are
converted when they are read."""


class MappedWeights:
    """The weights in the folder ``path`` of a VLM of the class ``cls``, by their names in the model.

    Raises :class:`.ArtifactError` like :func:`.read_module`.
    """

    def __init__(self, cls: Any, path: str) -> None:
        # In the type of the files, so that nothing is read before it is copied.
        read: Any = read_module(cls, path, f"the files of the VLM {path!r}", dtype=_stored_dtype(path))
        self._cls, self._config, self._generation = cls, read.config, read.generation_config
        for config in (self._config, *(getattr(self._config, name) for name in self._config.sub_configs)):
            config.dtype = torch.float32
        tensors = {**dict(read.named_parameters()), **dict(read.named_buffers())}
        self._tensors = {name: tensors[name].detach() for name in read.state_dict() if name in tensors}

    def empty_model(self) -> Any:
        """Return the model in float32 with its weights on the meta device; buffers are real."""
        with accelerate.init_empty_weights(include_buffers=False):
            model = self._cls(self._config)
        model.tie_weights()
        model.generation_config = self._generation
        return model.eval()

    @torch.no_grad()
    def move_into(self, model: nn.Module, shards: Shards) -> None:
        """Copy every weight into the model's memory, a tensor at a time; only this rank's rows of a sharded weight.

        Call it once: each tensor of the files is dropped after its copy.
        """
        live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, target in live.items():
            stored = self._tensors.pop(name.replace(".base_layer.", "."), None)
            if stored is None:
                continue
            if isinstance(target, DTensor):
                first, count = shards.rows(target.shape[0])
                target, stored = target.to_local(), stored[first : first + count]
            # Half types are converted on the device: fewer bytes are moved, and the CPU has no copy in float32.
            target.copy_(stored.to(target.device))
            _forget(stored)


def _stored_dtype(path: str) -> torch.dtype:
    """Return the type of all tensors in the files of a folder, float32 if they have several."""
    found: set[str] = set()
    for name in weight_files(path):
        with Path(path, name).open("rb") as stream:
            found |= {entry.dtype for entry in read_header(stream)}
    (only,) = found if len(found) == 1 and found <= set(STORED) else {"F32"}
    return dtype_of(only)


def _forget(tensor: Tensor) -> None:
    """Free the memory pages of a mapped tensor that nobody reads again."""
    if sys.platform != "linux" or not tensor.is_cpu or not tensor.nbytes:
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        # Files stay mapped as long as one of their tensors is held. All of these pages are read, and none was written.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
