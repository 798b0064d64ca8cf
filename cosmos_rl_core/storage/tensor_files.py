"""Safetensors files, read and written one tensor at a time, without holding a whole file in memory."""

import itertools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage.tensor_headers import TYPES, Readable, header_bytes, read_header

_DTYPES = {word: getattr(torch, name) for word, (name, _) in TYPES.items()}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}
_PLACE = {word: place for place, word in enumerate(TYPES)}

Tensors = Mapping[str, Tensor]
Spec = tuple[str, tuple[int, ...]]
"""A tensor's type, by its name in the safetensors format, and its shape."""


def spec_of(tensor: Tensor) -> Spec:
    """Return type and shape of a tensor."""
    return _WORDS[tensor.dtype], tuple(tensor.shape)


def decode(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor with these bytes, on the CPU, in memory that PyTorch allocated.

    On some CPUs the rounding of matrix products depends on the alignment of their operands in memory.
    """
    tensor = torch.empty(shape, dtype=dtype_of(dtype), device="cpu")
    if data:
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


def encode(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes: its own memory if it is contiguous and on the CPU, else a copy."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def dtype_of(word: str) -> torch.dtype:
    """Return the type with this name in the safetensors format. Raises :class:`ArtifactError` if it is unknown."""
    if word not in _DTYPES:
        raise ArtifactError(f"unknown tensor type {word!r}; known: {', '.join(_DTYPES)}")
    return _DTYPES[word]


def read_tensors(stream: Readable) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor, on the CPU, for each tensor of the file that begins where ``stream`` is.

    Raises :class:`ArtifactError` if the header is damaged or the file ends early.
    """
    for entry in read_header(stream):
        data = stream.read(entry.end - entry.start)
        if len(data) != entry.end - entry.start:
            raise ArtifactError(f"not a whole safetensors file: it ends inside tensor {entry.name}")
        yield entry.name, decode(data, entry.dtype, entry.shape)


def file_of(
    specs: Mapping[str, Spec], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file: the header, then each tensor, which ``read`` returns by name.

    The file is equal, byte for byte, to one of the safetensors library. Raises :class:`ArtifactError` if a tensor has
    another type or shape than in ``specs``.
    """
    order = sorted(specs, key=lambda name: (_PLACE[specs[name][0]], name))
    yield header_bytes(((name, *specs[name]) for name in order), metadata)
    for name in order:
        # No variable refers to the tensor, so that its memory is free before the next one is read.
        yield _checked(name, read(name), specs[name])


def _checked(name: str, tensor: Tensor, spec: Spec) -> memoryview:
    if spec_of(tensor) != spec:
        raise ArtifactError(f"{name} is {spec_of(tensor)}, expected {spec}")
    return encode(tensor)


def check_tensors(tensors: Tensors, expected: Tensors, what: str) -> Tensors:
    """Return ``tensors`` if their names, shapes and types equal ``expected``'s.

    Otherwise raises :class:`ArtifactError`, which states that they are not ``what``.
    """
    found = {name: spec_of(tensor) for name, tensor in tensors.items()}
    wanted = {name: spec_of(tensor) for name, tensor in expected.items()}
    if differing := sorted({name for name, _ in found.items() ^ wanted.items()}):
        each = (f"{name} is {found.get(name)}, expected {wanted.get(name)}" for name in differing)
        shown = "; ".join(itertools.islice(each, 3))
        raise ArtifactError(f"these tensors are not {what}: {len(differing)} differ, e.g. {shown}")
    return tensors
