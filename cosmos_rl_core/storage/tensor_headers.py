"""Headers of safetensors files, which list the tensors and their places. Imports no torch."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import ArtifactError

TYPES = {
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Name in torch and bytes of each type of the format, in the order by which the safetensors library sorts tensors."""
NUM_BYTES = {word: size for word, (_, size) in TYPES.items()}
"""Bytes of a number by the name of its type."""

_LENGTH = struct.Struct("<Q")
_MAX_LENGTH = 10**8
"""Largest length of a header in bytes, set by the format."""
_ALIGNED = 8
_METADATA = "__metadata__"


Described = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""


class Readable(Protocol):
    """A stream that is read in order, like a file."""

    def read(self, size: int, /) -> bytes:
        """Return the next ``size`` bytes, fewer at the end."""
        ...


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    name: str
    dtype: str
    """Name of the type in the format, a key of :data:`NUM_BYTES`."""
    shape: tuple[int, ...]
    start: int
    """Place of its first byte in the file."""
    end: int


def read_header(stream: Readable) -> list[Entry]:
    """Read a file's header from its beginning. Return the tensors in the order of their bytes.

    Raises :class:`ArtifactError` if the header is damaged, or if the tensors have gaps between them or overlap.
    """
    entries: list[Entry] = []
    try:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        if length > _MAX_LENGTH:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, dict[str, Any]] = from_json(stream.read(length))
        header.pop(_METADATA, None)
        begin = _LENGTH.size + length
        for name, about in header.items():
            start, end = (begin + offset for offset in about["data_offsets"])
            entries.append(Entry(name, about["dtype"], tuple(about["shape"]), start, end))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"not a safetensors file: {error!r}") from error
    entries.sort(key=lambda entry: (entry.start, entry.end))
    ends = [begin, *(entry.end for entry in entries)]
    if any(entry.start != end for entry, end in zip(entries, ends, strict=False)):
        raise ArtifactError("not a safetensors file: its tensors have gaps or overlap")
    return entries


def header_bytes(tensors: Iterable[Described], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors in this order.

    It equals, byte for byte, the header that the safetensors library writes.
    """
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name, dtype, shape in tensors:
        end = start + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _ALIGNED)
    return _LENGTH.pack(len(encoded)) + encoded


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes."""
    return NUM_BYTES[dtype] * math.prod(shape)
