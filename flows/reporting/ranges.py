"""The part of a file that a browser asks for: players of videos ask for parts."""

import re
from collections.abc import Iterator
from typing import BinaryIO

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

CHUNK_BYTES = 2**20


def answer(file: BinaryIO, asked: str | None, media_type: str, headers: dict[str, str]) -> Response:
    """Return the bytes of a file: the range that the header ``Range`` asks for, or all of them.

    A header with several ranges, or in another form, is ignored, as RFC 9110 allows. Closes the file when all is sent.
    Raises ``HTTPException`` 416 for a range outside of the file.
    """
    size = file.seek(0, 2)
    try:
        asked_range = asked_of(asked, size)
    except HTTPException:
        file.close()
        raise
    start, end = asked_range or (0, size)
    own = {"accept-ranges": "bytes", "content-length": str(end - start)}
    if asked_range is not None:
        own["content-range"] = f"bytes {start}-{end - 1}/{size}"
    status = 200 if asked_range is None else 206
    return StreamingResponse(_chunks(file, start, end), status, headers | own, media_type)


def asked_of(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the begin of the one range that a header asks for, and its end, which is excluded; None for all bytes.

    Raises ``HTTPException`` 416 if the file of ``size`` bytes has none of them.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if found is None or not any(found.groups()):
        return None
    first, last = found.groups()
    if first == "":
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
        if last and int(last) < start:
            return None
    if start >= end:
        raise HTTPException(416, f"the file has {size} bytes", {"content-range": f"bytes */{size}"})
    return start, end


def _chunks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """Yield bytes of a file, which may be the weights of a large model."""
    with file:
        file.seek(start)
        while start < end and (data := file.read(min(CHUNK_BYTES, end - start))):
            start += len(data)
            yield data
