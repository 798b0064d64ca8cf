"""The open tars of a unit of shards, and the files of the samples in them."""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from io import BufferedReader, RawIOBase
from pathlib import PurePath
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, NamedTuple, cast

from cosmos_rl_core.datasets import _shard_urls
from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.storage import http, store, tars

_SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_ABOUT_THE_TAR = re.compile(r"__[^/]*__(/|$)")
_SHORTER = "a shard became shorter while it was read; start again"
_COPIED_BYTES = 2**25


class Place(NamedTuple):
    """A file in one of the tars of a unit."""

    tar: int
    file: tars.File

    @property
    def name(self) -> str:
        """Return the name of the file, without folders."""
        return PurePath(self.file.name).name


Sample = dict[str, Place]
"""Files of a sample by extension, in lower case."""


class Shard:
    """The open tars of a unit, and the samples in them."""

    def __init__(self, unit: str, urls: Iterable[str], stamps: dict[str, str]):
        self.unit = unit
        self.samples: dict[str, Sample] = {}
        self.captioned = set[str]()
        """Samples whose captions were read and are not damaged."""
        self._files: list[IO[bytes]] = []
        try:
            for number, url in enumerate(urls):
                self._files.append(_opened(url, stamps[url]))
                self._add(number, _shard_urls.shown(url))
            if not self.samples:
                raise ItemError("no sample in it; expected files such as 000017.mp4 and 000017.txt")
        except BaseException:
            self.close()
            raise

    def _add(self, number: int, url: str) -> None:
        try:
            for file in tars.files(cast("BinaryIO", self._files[number])):
                named = _SAMPLE.fullmatch(file.name)
                if named is None or _ABOUT_THE_TAR.match(file.name):
                    continue
                sample, extension = self.samples.setdefault(named[1], {}), named[2].lower()
                if extension in sample:
                    raise tars.TarError(f"{file.name!r} comes twice, in capitals and small letters or in two tars")
                sample[extension] = Place(number, file)
        except tars.TarError as error:
            raise ItemError(f"{url}: {error}") from error

    def open(self, place: Place) -> BinaryIO:
        """Open a file in the tars; it stays open when they are closed."""
        return cast("BinaryIO", BufferedReader(_Section(self._files[place.tar], place.file)))

    def read(self, place: Place) -> bytes:
        """Read a small file in the tars. Raises :class:`DatasetError` if the tar has become shorter."""
        data = os.pread(self._files[place.tar].fileno(), place.file.size, place.file.start)
        if len(data) < place.file.size:
            raise DatasetError(_SHORTER)
        return data

    def close(self) -> None:
        """Close the tars, and delete the copies."""
        for file in self._files:
            file.close()

    def __del__(self) -> None:
        self.close()


class _Section(RawIOBase):
    """A file in a tar, read from its place there."""

    def __init__(self, tar: IO[bytes], file: tars.File):
        super().__init__()
        self._tar, self._start, self._size, self._at = os.dup(tar.fileno()), file.start, file.size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place in the file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot go to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes."""
        wanted = min(len(buffer), max(0, self._size - self._at))
        data = os.pread(self._tar, wanted, self._start + self._at)
        if wanted and not data:
            raise DatasetError(_SHORTER)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            os.close(self._tar)
        super().close()


def stamp_of(url: str) -> str | None:
    """Return the stamp of a tar, or None if it does not exist."""
    if not _shard_urls.is_http(url):
        return store.stamp(url)
    with suppress(FileNotFoundError):
        return http.stamp(url)
    return None


def _opened(url: str, stamp: str) -> IO[bytes]:
    """Open a tar on a disk, or a copy without a name of another. Raises :class:`DatasetError` if it has changed."""
    file: IO[bytes] = TemporaryFile() if "://" in url else open(url, "rb")  # noqa: SIM115
    try:
        if _shard_urls.is_http(url):
            http.copy(url, cast("BinaryIO", file))
        elif "://" in url:
            size = store.size(url) or 0
            for start in range(0, size, _COPIED_BYTES):
                file.write(store.read(url, start, min(start + _COPIED_BYTES, size)))
        file.flush()
        if stamp_of(url) != stamp:
            raise DatasetError(f"{_shard_urls.shown(url)} has changed since it was listed; start again")
    except BaseException:
        file.close()
        raise
    return file
