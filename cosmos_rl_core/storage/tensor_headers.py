"""Headers of safetensors files: which tensors there are, and where each lies. Torch-free."""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cosmos_rl_core.errors import ArtifactError

NUM_BYTES = {"U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2}
NUM_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of a number, by the format's name of its type; in the order in which the format's own writer sorts tensors."""

_LENGTH = struct.Struct("<Q")
_MAX_LENGTH = 10**8
"""The format's own bound."""
_ALIGNED = 8
_METADATA = "__metadata__"


class Readable(Protocol):
    """Gives bytes in order, as a file does."""

    def read(self, size: int, /) -> bytes:
        """The next ``size`` bytes, fewer at the end."""
        ...


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: str
    """The format's word for it, a key of :data:`NUM_BYTES`."""
    shape: tuple[int, ...]
    start: int
    """Its first byte in the file."""
    end: int


def read_header(stream: Readable) -> list[Entry]:
    """The tensors of the file that ``stream`` is at the beginning of, in the order in which they follow now.

    Raises :class:`ArtifactError` unless they lie side by side, without a gap, as the format demands.
    """
    try:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        if length > _MAX_LENGTH:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, dict] = json.loads(stream.read(length))
        header.pop(_METADATA, None)
        begin = _LENGTH.size + length
        entries = [
            Entry(name, entry["dtype"], tuple(entry["shape"]), *(begin + n for n in entry["data_offsets"]))
            for name, entry in header.items()
        ]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"not a safetensors file: {error!r}") from error
    entries.sort(key=lambda entry: (entry.start, entry.end))
    if [entry.start for entry in entries] != [begin, *(entry.end for entry in entries)][: len(entries)]:
        raise ArtifactError("not a safetensors file: its tensors do not follow one another")
    return entries


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """What a file of these tensors (name, type, shape), which follow in this order, begins with: the bytes that the
    format's own writer gives it."""
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
    """Of a tensor."""
    return NUM_BYTES[dtype] * math.prod(shape)
