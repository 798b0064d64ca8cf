"""Tar shards as webdataset reads them: on a disk, in S3 or at http(s) URLs.

A sample is the files of a tar whose paths are equal up to the first dot of the name: ``000017.mp4``, ``000017.txt``.
Its medium is the file with the extension of an image or video. Its caption is ``.txt``, or ``prompt`` in ``.json``.
With an index of upstream's layout, a sample is in two tars of one name, in ``metas/`` and ``video/``; its caption is
that of its first window, and all windows are kept as metadata. Nothing of a tar is extracted.
"""

import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader, RawIOBase
from pathlib import PurePath
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, Literal, NamedTuple, cast

from pydantic import Field, field_validator

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _shard_urls
from cosmos_rl_core.datasets._base import Item, ItemError, Prompt, prompt_id
from cosmos_rl_core.datasets._files import IMAGES, PROMPT, VIDEOS, caption_in, checked, kind_of, parsed
from cosmos_rl_core.errors import DatasetError, mistakes_in
from cosmos_rl_core.storage import http, store, tars

MAX_CAPTION_BYTES = 2**20
"""Largest file of a caption that is read."""
SHARDS_KEPT = 8
"""Shards that stay open: as many as the index reads at once."""
WINDOWS, WINDOW_CAPTION = "t2w_windows", "qwen2p5_7b_caption"
"""Names in the captions of upstream's layout: the windows of a video, and the caption of a window."""

_SAMPLE = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_ABOUT_THE_TAR = re.compile(r"__[^/]*__(/|$)")
_LOOKED_UP_AT_ONCE = 16
_SHORTER = "a shard became shorter while it was read; start again"
_COPIED_BYTES = 2**25


class Options(DatasetOptions):
    """Places of the shards, and which files of a sample are read."""

    name: Literal["web"] = "web"  # pyright: ignore[reportIncompatibleVariableOverride]

    urls: tuple[UserPath, ...] = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Tars, with braces for many (``s3://bucket/clips/{000..012}.tar``), folders of tars, or an index of upstream's
    layout (``wdinfo.json``, with ``root`` and ``data_list``). A path, ``s3://`` or ``http(s)://``."""
    medium: str | None = None
    """Extension of the medium, such as ``mp4``; by default the only one of an image or video."""
    caption: str | None = None
    """Extension of the caption, such as ``caption.txt``; by default ``txt``, or ``json`` where there is none."""
    caption_key: str | None = None
    """Key of the caption in JSON; by default ``prompt``, in windows ``qwen2p5_7b_caption``."""

    @field_validator("urls", mode="before")
    @classmethod
    def _several(cls, urls: object) -> object:
        """Take one URL for a list with it."""
        return (urls,) if isinstance(urls, str) else tuple(urls) if isinstance(urls, list) else urls

    @field_validator("urls")
    @classmethod
    def _readable(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse URLs that cannot be read, all at once."""
        if wrong := [*_shard_urls.mistakes(urls)]:
            raise ValueError("; ".join(wrong))
        return urls


class _Place(NamedTuple):
    """A file in one of the tars of a unit."""

    tar: int
    file: tars.File


_Sample = dict[str, _Place]
"""Files of a sample by extension, in lower case."""


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return each caption once, in the order of the samples. Reads all shards, and decodes no medium.

    Raises one :class:`ConfigError` with every mistake: shards and samples that cannot be used.
    """
    source, texts, wrong = Source(options), list[str](), list[str]()
    for unit in source.stamps():
        try:
            items = source.items(unit)
        except ItemError as error:
            wrong.append(f"{unit}: {error}")
            continue
        for item in items:
            try:
                source.open(item.name).close()
                texts.append(checked(item.name, item.caption))
            except ItemError as error:
                wrong.append(f"{unit}: {error}")
    if wrong:
        raise mistakes_in(", ".join(map(_shard_urls.shown, options.urls)), wrong)
    return tuple(Prompt(id=prompt_id(text), text=text) for text in dict.fromkeys(texts))


class Source:
    """Shards of samples: a unit is a tar, or the tars of one name in upstream's layout. Items are in the tar's order.

    A tar that is not on a disk is copied to a temporary file, once if its items are read in its order.
    """

    many = True

    def __init__(self, options: Options):
        self._options = options
        self._tars: _shard_urls.Places = {}
        self._stamps: dict[str, str] = {}
        self._kept: dict[str, Future[_Shard]] = {}
        self._lock = threading.Lock()

    def stamps(self) -> dict[str, str]:
        """Return size and time, or ETag, of the tars of each unit. Raises :class:`ConfigError` if some are missing."""
        self._tars, self._kept = _shard_urls.places(self._options.urls), {}
        found = {url: stamp for tars in self._tars.values() for url, stamp in tars.items()}
        unknown = [url for url, stamp in found.items() if stamp is None]
        with ThreadPoolExecutor(_LOOKED_UP_AT_ONCE) as pool:
            found |= zip(unknown, pool.map(_stamp, unknown), strict=True)
        self._stamps = {url: stamp for url, stamp in found.items() if stamp is not None}
        if missing := found.keys() - self._stamps.keys():
            raise mistakes_in("no shard at", sorted(map(_shard_urls.shown, missing)))
        return {unit: "; ".join(self._stamps[url] for url in places) for unit, places in sorted(self._tars.items())}

    def items(self, unit: str) -> list[Item]:
        """Return the samples of a unit, also those that :meth:`open` refuses.

        Raises :class:`ItemError` if it is no tar, or one that nobody should unpack.
        """
        shard = self._shard(unit)
        return [self._item(shard, key) for key in shard.samples]

    def open(self, name: str) -> BinaryIO:
        """Open the medium of a sample. Raises :class:`ItemError` if it has none, or its caption is damaged."""
        shard, key = self._of(name)
        if key not in shard.captioned:
            self._caption(shard, key)
        return shard.open(self._medium(shard.samples[key], key))

    def _item(self, shard: "_Shard", key: str) -> Item:
        # One damaged sample is left out alone, when it is opened.
        caption, metadata, kind = None, dict[str, Any](), "image"
        with suppress(ItemError):
            kind = kind_of(self._medium(shard.samples[key], key).file.name)
            caption, metadata = self._caption(shard, key)
            shard.captioned.add(key)
        return Item(f"{shard.unit}/{key}", kind, caption, metadata)

    def _medium(self, sample: _Sample, key: str) -> _Place:
        chosen = self._options.medium
        found = [one for one in sample if (one == chosen.lower() if chosen else f".{one}" in IMAGES | VIDEOS)]
        if len(found) > 1:
            raise ItemError(f"{key}: more than one medium: {', '.join(found)}; name one as `medium`")
        if not found:
            raise ItemError(f"{key}: no {chosen or 'image or video'}, only {', '.join(sample)}")
        return sample[found[0]]

    def _caption(self, shard: "_Shard", key: str) -> tuple[str | None, dict[str, Any]]:
        """Return caption and metadata of a sample; None if there is no file for it."""
        sample, chosen = shard.samples[key], self._options.caption
        place = next((sample[one] for one in ([chosen.lower()] if chosen else ["txt", "json"]) if one in sample), None)
        if place is None:
            return None, {}
        name = PurePath(place.file.name).name
        if place.file.size > MAX_CAPTION_BYTES:
            raise ItemError(f"{name}: {place.file.size} bytes, expected at most {MAX_CAPTION_BYTES} of a caption")
        value = parsed(name, shard.read(place))
        if isinstance(value, dict) and WINDOWS in value:
            return _of_windows(name, value, self._options.caption_key or WINDOW_CAPTION), value
        return caption_in(name, value, self._options.caption_key or PROMPT)

    def _of(self, name: str) -> tuple["_Shard", str]:
        """Return the shard of an item, and the sample's key there. Raises ``KeyError`` if it is not there."""
        for place, letter in enumerate(name):
            if letter == "/" and name[:place] in self._tars:
                shard, key = self._shard(name[:place]), name[place + 1 :]
                if key in shard.samples:
                    return shard, key
        raise KeyError(name)

    def _shard(self, unit: str) -> "_Shard":
        """Return a unit's tars, open. Those that were asked for last are kept, for all threads."""
        with self._lock:
            kept = self._kept.pop(unit, None)
            shard = kept or Future["_Shard"]()
            self._kept[unit] = shard
            if len(self._kept) > SHARDS_KEPT:
                del self._kept[next(iter(self._kept))]
        if kept is None:
            try:
                shard.set_result(_Shard(unit, self._tars[unit], self._stamps))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(unit, None)
                shard.set_exception(error)
        return shard.result()


class _Shard:
    """The open tars of a unit, and the samples in them."""

    def __init__(self, unit: str, urls: Iterable[str], stamps: dict[str, str]):
        self.unit = unit
        self.samples: dict[str, _Sample] = {}
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
                sample[extension] = _Place(number, file)
        except tars.TarError as error:
            raise ItemError(f"{url}: {error}") from error

    def open(self, place: _Place) -> BinaryIO:
        """Open a file in the tars; it stays open when they are closed."""
        return cast("BinaryIO", BufferedReader(_Section(self._files[place.tar], place.file)))

    def read(self, place: _Place) -> bytes:
        """Read a small file in the tars."""
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


def _of_windows(name: str, value: dict[str, Any], key: str) -> str:
    """Return the caption of the first window of a video."""
    windows = value[WINDOWS]
    if not isinstance(windows, list) or not windows or not isinstance(windows[0], dict):
        raise ItemError(f"{name}: no window; expected a list of objects as {WINDOWS}")
    if key not in windows[0]:
        raise ItemError(f"{name}: no {key} in the first window, only {', '.join(sorted(windows[0]))}")
    return checked(name, windows[0][key], key)


def _stamp(url: str) -> str | None:
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
        if _stamp(url) != stamp:
            raise DatasetError(f"{_shard_urls.shown(url)} has changed since it was listed; start again")
    except BaseException:
        file.close()
        raise
    return file
