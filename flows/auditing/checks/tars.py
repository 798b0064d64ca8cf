"""Names of a tar's members, read while its bytes are hashed."""

import tarfile
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, cast

from stages.artifacts.files import BLOCK_BYTES

Members = dict[str, bytes]
"""The members of a tar by name, with the bytes of members that are JSON; others are empty."""


def look(blocks: Iterable[bytes]) -> tuple[str, Members | None]:
    """Return the sha256 of all blocks of a tar, and its members; None in their place if it is no tar.

    Memory holds a block and the JSON of a unit.
    """
    stream, members = _Hashed(iter(blocks)), Members()
    try:
        with tarfile.open(fileobj=cast("Any", stream), mode="r|", bufsize=BLOCK_BYTES) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.name.endswith(".json") else None
                members[member.name] = b"" if file is None else file.read()
    except (tarfile.TarError, EOFError, ValueError):
        return stream.digest(), None
    return stream.digest(), members


class _Hashed:
    """A stream of blocks that hashes them as they are read."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._hash, self._left = blocks, sha256(), b""

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most ``size``; fewer only at the end."""
        while len(self._left) < size and (block := self._next()):
            self._left += block
        found, self._left = self._left[:size], self._left[size:]
        return found

    def digest(self) -> str:
        """Return the sha256 of all blocks."""
        while self._next():
            pass
        return self._hash.hexdigest()

    def _next(self) -> bytes:
        block = next(self._blocks, b"")
        self._hash.update(block)
        return block
