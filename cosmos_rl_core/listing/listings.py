"""Listings of folders, each made once: they tell which files exist, how large they are, and which are absent.

A look at hundreds of artifacts asks for many files that do not exist. One listing of a folder answers for all of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cosmos_rl_core.listing.stamps import local_stamp


class Seen(NamedTuple):
    """A file in a listing."""

    size: int
    stamp: str
    """Text that changes with the size of the file, and with the time or the tag of its last write."""


@dataclass
class Listing:
    """The files in a folder and in the folders below it."""

    files: dict[str, Seen]
    """Files by their URLs."""
    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Names of the files and folders directly in each folder, by the URL of the folder."""

    @classmethod
    def of(cls, folder: str, files: Mapping[str, Seen]) -> "Listing":
        """Return the listing of files whose names are relative to ``folder``."""
        found = cls({f"{folder}/{name}": seen for name, seen in files.items()})
        for name in files:
            above, _, inside = f"{folder}/{name}".rpartition("/")
            while inside and inside not in (there := found.names.setdefault(above, set())):
                there.add(inside)
                if above == folder:
                    break
                above, _, inside = above.rpartition("/")
        return found


Entries = dict[str, dict[str, Any]]
"""Facts of files by their paths, as fsspec gives them."""
Folders = Callable[[str], str | None]
"""Function that returns the folder to list for the URL of a file, or None if the file is looked up by itself."""
_KNOWN: ContextVar[tuple[Folders, dict[str, Listing | None]] | None] = ContextVar("known", default=None)
"""The function and the listings of the current block, by folder; None for a folder that cannot be read."""


@contextmanager
def listed_once(folder_of: Folders) -> Iterator[None]:
    """List folders instead of looking up their files one by one, inside the block.

    Listings include the writes of this thread inside the block; they may miss writes of others meanwhile.
    """
    token = _KNOWN.set((folder_of, {}))
    try:
        yield
    finally:
        _KNOWN.reset(token)


def looks_in_listings() -> bool:
    """Return whether the caller is inside a block of :func:`listed_once`."""
    return _KNOWN.get() is not None


def listing_of(url: str, listed: Callable[[str], Listing | None]) -> Listing | None:
    """Return the listing that includes the folder of a file.

    None outside a block of :func:`listed_once`, for files without a folder to list, and for unreadable folders.
    ``listed`` makes the listing of a folder.
    """
    if (here := _KNOWN.get()) is None:
        return None
    folder_of, known = here
    if (folder := folder_of(url)) is None:
        return None
    if folder not in known:
        known[folder] = listed(folder)
    return known[folder]


def listed_folder(url: str, listed: Callable[[str], Listing | None]) -> tuple[str, Mapping[str, Seen]] | None:
    """Return the listed folder that a file is in, and all files in it; None where :func:`listing_of` returns None."""
    found = listing_of(url, listed)
    folder = None if (here := _KNOWN.get()) is None else here[0](url)
    return None if found is None or folder is None else (folder, found.files)


def forget(url: str) -> None:
    """Forget the listing that includes a file, which is about to be written or deleted."""
    if (here := _KNOWN.get()) is not None and (folder := here[0](url)) is not None:
        here[1].pop(folder, None)


def entries(folder: str) -> Entries:
    """Return size and time of the last write of all files below a local folder, by their paths.

    Links are not followed into folders. Raises ``OSError`` for a folder that cannot be read: otherwise its files would
    seem to be gone.
    """
    found: Entries = {}
    left = [folder]
    while left:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(left.pop()) as here:
            for entry in here:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                    continue
                with suppress(FileNotFoundError):
                    written_s, size = entry.stat(follow_symlinks=False).st_mtime, 0
                    with suppress(OSError):  # a broken link
                        size = entry.stat().st_size
                    found[entry.path] = {"size": size, "mtime": written_s}
    return dict(sorted(found.items()))


def local_files(folder: str) -> dict[str, Seen] | None:
    """Return the files in and below a local folder by their relative names; None if any folder cannot be read.

    Broken links are left out.
    """
    try:
        return _walked(folder)
    except OSError:
        # The caller then looks up each file by itself, and gets an error that names the file.
        return None


def _walked(folder: str) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    left = [(folder, "")]
    while left:
        path, prefix = left.pop()
        try:
            entries = os.scandir(path)
        except FileNotFoundError:
            continue
        with entries:
            for entry in entries:
                if entry.is_dir():
                    left.append((entry.path, f"{prefix}{entry.name}/"))
                elif entry.is_file():
                    status = entry.stat()
                    found[prefix + entry.name] = Seen(status.st_size, local_stamp(status))
    return found
