"""Stamps of files: they change with the size and the time of a file, or with the tag that a store gives it."""

import os
from collections.abc import Iterator, Mapping
from typing import Any


def local_stamps(folder: str, prefix: str = "", above: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield the name, relative to ``folder``, and the stamp of each file. Links to a folder above them are skipped."""
    here = os.path.realpath(folder)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from local_stamps(entry.path, f"{prefix}{entry.name}/", above | {here})
            elif entry.is_file():
                yield f"{prefix}{entry.name}", local_stamp(entry.stat())


def local_stamp(status: os.stat_result) -> str:
    """Return the stamp of a local file."""
    return f"{status.st_size} {status.st_mtime_ns}"


def stamp_in(entry: Mapping[str, Any]) -> str:
    """Return the stamp of a file from its entry in the listing of a remote store."""
    named = (str(entry[name]).strip('"') for name in ("ETag", "VersionId") if entry.get(name))
    return " ".join([str(entry["size"]), *named])


def is_hidden(name: str) -> bool:
    """Return whether the name of a file or folder marks it as hidden."""
    return name.startswith(".")
