"""Local copies of media, hashed while they are read.

Decoders get the copy, so that a store that fails while it is read never looks like a damaged file.
"""

import hashlib
from tempfile import SpooledTemporaryFile
from typing import BinaryIO, cast

_BLOCK_BYTES = 2**20
_MOST_IN_MEMORY_BYTES = 2**26
"""Size of a file beyond which its copy is on disk."""


def copied(file: BinaryIO) -> tuple[BinaryIO, str, int]:
    """Return a copy of a file, which is deleted when it is closed, and the digest and number of its bytes."""
    found, size = hashlib.sha256(), 0
    copy = cast("BinaryIO", SpooledTemporaryFile(_MOST_IN_MEMORY_BYTES))  # noqa: SIM115
    try:
        while block := file.read(_BLOCK_BYTES):
            found.update(block)
            size += copy.write(block)
        copy.seek(0)
    except BaseException:
        copy.close()
        raise
    return copy, found.hexdigest(), size
