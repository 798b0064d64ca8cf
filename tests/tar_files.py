"""Tars as tests need them."""

import io
import tarfile
from collections.abc import Mapping
from typing import Any


def shard(files: Mapping[str, bytes]) -> bytes:
    """A tar of files."""
    return made(*((name, data, {}) for name, data in files.items()))


def made(*members: tuple[str, bytes, dict[str, Any]], format: int = tarfile.GNU_FORMAT) -> bytes:
    """A tar of members, each with a name, bytes and other fields of its header."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data, fields in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
