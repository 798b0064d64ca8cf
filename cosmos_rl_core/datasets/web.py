"""Tar shards as webdataset reads them: on a disk, in S3 or at http(s) URLs.

A sample is the files of a tar whose paths are equal up to the first dot of the name: ``000017.mp4``, ``000017.txt``.
Its medium is the file with the extension of an image or video. Its caption is ``.txt``, or ``prompt`` in ``.json``.
The object may have ``references``, a list of pictures that the caption refers to: other files of the sample by their
extensions, such as ``source.png`` for ``000017.source.png``, or by their names. If the caption is in ``.txt``, only the
references of the object are read. With an index of upstream's layout, a sample is in two tars of one name, in
``metas/`` and ``video/``; its caption is the caption of its first window, and all windows are kept as metadata. Tars
are not extracted.
"""

import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import PurePath
from typing import Any, BinaryIO, Literal

from pydantic import Field, PositiveInt, field_validator

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _shard_urls, _sources
from cosmos_rl_core.datasets._base import Item, ItemError, Picture, Prompt, Reference, prompt_id
from cosmos_rl_core.datasets._files import (
    IMAGES,
    PROMPT,
    REFERENCES,
    VIDEOS,
    caption_in,
    checked,
    kind_of,
    line,
    parsed,
)
from cosmos_rl_core.datasets._reference_pixels import MOST_BYTES
from cosmos_rl_core.datasets._references import frame_in, places_in
from cosmos_rl_core.datasets._shard import Place, Sample, Shard, stamp_of
from cosmos_rl_core.errors import mistakes_in
from cosmos_rl_core.storage import store

MAX_CAPTION_BYTES = 2**20
"""Largest size in bytes of a file with a caption."""
SHARDS_KEPT = 8
"""Number of shards that stay open: as many as the index reads at once."""
WINDOWS, WINDOW_CAPTION = "t2w_windows", "qwen2p5_7b_caption"
"""Names in the captions of upstream's layout: the windows of a video, and the caption of a window."""

_LOOKED_UP_AT_ONCE = 16


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
    first_frame: bool = Field(default=False, json_schema_extra={"neutral": False})
    """The first frame of each medium is its reference, for models that make a video of a picture."""
    size: tuple[PositiveInt, PositiveInt] = Field(default=(1024, 1024), json_schema_extra={"neutral": [1024, 1024]})
    """Height and width that first frames are scaled and cropped to: the size of the videos that are trained on."""

    @field_validator("urls", mode="before")
    @classmethod
    def _several(cls, urls: object) -> object:
        """Make a list of a single URL."""
        return (urls,) if isinstance(urls, str) else tuple(urls) if isinstance(urls, list) else urls

    @field_validator("urls")
    @classmethod
    def _readable(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse URLs that cannot be read, all at once."""
        if wrong := [*_shard_urls.mistakes(urls)]:
            raise ValueError("; ".join(wrong))
        return urls


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return each caption once, in the order of the samples. Reads all shards, but decodes media only for first frames.

    Raises one :class:`ConfigError` with every mistake: shards and samples that cannot be used.
    """
    source, found, wrong = Source(options), dict[str, Prompt](), list[str]()
    for unit in source.stamps():
        try:
            items = source.items(unit)
        except ItemError as error:
            wrong.append(f"{unit}: {error}")
            continue
        for item in items:
            try:
                prompt = _prompt(source, item)
                found.setdefault(prompt.id, prompt)
            except ItemError as error:
                wrong.append(f"{unit}: {error}")
    if wrong:
        raise mistakes_in(", ".join(map(_shard_urls.shown, options.urls)), wrong)
    return tuple(found.values())


def _prompt(source: "Source", item: Item) -> Prompt:
    references = source.spans(item)  # first, because it raises with the reason if a caption is damaged
    text = checked(item.name, item.caption)
    return Prompt(id=prompt_id(text, [one.digest for one in references]), text=text, references=references)


class Source:
    """Shards of samples: a unit is a tar, or the tars of one name in upstream's layout. Items are in the tar's order.

    A tar that is not on a disk is copied to a temporary file, once if its items are read in its order.
    """

    many = True

    def __init__(self, options: Options):
        self._options = options
        self._tars: _shard_urls.Places = {}
        self._stamps: dict[str, str] = {}
        self._kept: dict[str, Future[Shard]] = {}
        self._lock = threading.Lock()

    def stamps(self) -> dict[str, str]:
        """Return size and time, or ETag, of the tars of each unit. Raises :class:`ConfigError` if some are missing."""
        self._tars, self._kept = _shard_urls.places(self._options.urls), {}
        found = {url: stamp for tars in self._tars.values() for url, stamp in tars.items()}
        unknown = [url for url, stamp in found.items() if stamp is None]
        with ThreadPoolExecutor(_LOOKED_UP_AT_ONCE) as pool:
            found |= zip(unknown, pool.map(stamp_of, unknown), strict=True)
        self._stamps = {url: stamp for url, stamp in found.items() if stamp is not None}
        if missing := found.keys() - self._stamps.keys():
            raise mistakes_in("no shard at", sorted(map(_shard_urls.shown, missing)))
        return {unit: "; ".join(self._stamps[url] for url in places) for unit, places in sorted(self._tars.items())}

    def items(self, unit: str) -> list[Item]:
        """Return the samples of a unit, also the samples that :meth:`open` refuses.

        Raises :class:`ItemError` if it is no tar, or not safe to unpack.
        """
        shard = self._shard(unit)
        return [self._item(shard, key) for key in shard.samples]

    def open(self, name: str) -> BinaryIO:
        """Open the medium of a sample. Raises :class:`ItemError` if it has none, or its caption is damaged."""
        shard, key = self._captioned(name)
        return shard.open(self._medium(shard.samples[key], key))

    def references(self, item: Item) -> list[Picture]:
        """Return the pictures that a caption refers to, or the first frame. Raises :class:`ItemError`."""
        shard, key = self._captioned(item.name)
        pictures = [Picture(one.name, shard.read(one)) for one in self._pictures(shard, key, item)]
        if not self._options.first_frame:
            return pictures
        if pictures:
            raise ItemError(f"{key}: its caption names references; leave first_frame out, or the references")
        self._medium(shard.samples[key], key)
        if item.kind == "image":
            raise ItemError(f"{key}: an image; first_frame takes videos here")
        with self.open(item.name) as file:
            return [Picture(f"{key}, frame 0", frame_in(file, item.kind, 0, self._options.size))]

    def spans(self, item: Item) -> tuple[Reference, ...]:
        """Return the references of a sample with their places in the tars.

        Raises :class:`ItemError` if one cannot be used, or lies where no run can read it again.
        """
        found = [reference for reference, _ in _sources.references_of(self, item)]
        if not found:
            return ()
        (shard, key), is_frame = self._of(item.name), self._options.first_frame
        places = [self._medium(shard.samples[key], key)] if is_frame else self._pictures(shard, key, item)
        urls = [*self._tars[shard.unit]]
        if any(_shard_urls.is_http(urls[place.tar]) for place in places):
            raise ItemError(f"{key}: references in tars at http(s) URLs are kept by cosmos-flows preprocess alone")
        told = [
            {"source": store.absolute(urls[tar]), "span": (file.start, file.start + file.size)} for tar, file in places
        ]
        frame = {"frame": 0} if is_frame else {}
        return tuple(one.model_copy(update=place | frame) for one, place in zip(found, told, strict=True))

    def _pictures(self, shard: Shard, key: str, item: Item) -> list[Place]:
        """Return the files that the caption of a sample refers to."""
        sample = shard.samples[key]
        try:
            names = places_in(item.metadata.get(REFERENCES, []))
        except ValueError as error:
            raise ItemError(f"{key}: {error}") from error
        found = [_named(sample, key, name) for name in names]
        for place in found:
            if place.file.size > MOST_BYTES:
                raise ItemError(f"{place.name}: {place.file.size} bytes, at most {MOST_BYTES} are taken")
        return found

    def _item(self, shard: Shard, key: str) -> Item:
        # Raises no error, so that a damaged sample is left out alone, when it is opened. Prompts need no medium.
        caption, metadata, kind = None, dict[str, Any](), "image"
        with suppress(ItemError):
            caption, metadata = self._caption(shard, key)
            shard.captioned.add(key)
        with suppress(ItemError):
            kind = kind_of(self._medium(shard.samples[key], key).file.name)
        return Item(f"{shard.unit}/{key}", kind, caption, metadata)

    def _medium(self, sample: Sample, key: str) -> Place:
        chosen = self._options.medium
        found = [one for one in sample if (one == chosen.lower() if chosen else f".{one}" in IMAGES | VIDEOS)]
        if len(found) > 1:
            raise ItemError(f"{key}: more than one medium: {', '.join(found)}; name one as `medium`")
        if not found:
            raise ItemError(f"{key}: no {chosen or 'image or video'}, only {', '.join(sample)}")
        return sample[found[0]]

    def _caption(self, shard: Shard, key: str) -> tuple[str | None, dict[str, Any]]:
        """Return caption and metadata of a sample; None and an empty table if it has no file with a caption."""
        sample, chosen = shard.samples[key], self._options.caption
        place = next((sample[one] for one in ([chosen.lower()] if chosen else ["txt", "json"]) if one in sample), None)
        if place is None:
            return None, {}
        name = place.name
        if place.file.size > MAX_CAPTION_BYTES:
            raise ItemError(f"{name}: {place.file.size} bytes, expected at most {MAX_CAPTION_BYTES} of a caption")
        value = parsed(name, shard.read(place))
        if not name.lower().endswith(".json"):
            return caption_in(name, value)[0], _references_next_to(shard, sample)
        if isinstance(value, dict) and WINDOWS in value:
            return _of_windows(name, value, self._options.caption_key or WINDOW_CAPTION), value
        return caption_in(name, value, self._options.caption_key or PROMPT)

    def _captioned(self, name: str) -> tuple[Shard, str]:
        """Return the shard of an item, and the sample's key there. Raises :class:`ItemError` for a damaged caption."""
        shard, key = self._of(name)
        if key not in shard.captioned:
            self._caption(shard, key)
        return shard, key

    def _of(self, name: str) -> tuple[Shard, str]:
        """Return the shard of an item, and the sample's key there. Raises ``KeyError`` if it is not there."""
        for place, letter in enumerate(name):
            if letter == "/" and name[:place] in self._tars:
                shard, key = self._shard(name[:place]), name[place + 1 :]
                if key in shard.samples:
                    return shard, key
        raise KeyError(name)

    def _shard(self, unit: str) -> Shard:
        """Return the open tars of a unit. The tars that were used last stay open, for all threads."""
        with self._lock:
            kept = self._kept.pop(unit, None)
            shard = kept or Future[Shard]()
            self._kept[unit] = shard
            if len(self._kept) > SHARDS_KEPT:
                del self._kept[next(iter(self._kept))]
        if kept is None:
            try:
                shard.set_result(Shard(unit, self._tars[unit], self._stamps))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(unit, None)
                shard.set_exception(error)
        return shard.result()


def _named(sample: Sample, key: str, name: str) -> Place:
    """Return the file of a sample with this extension or name, in capitals or small letters.

    Raises :class:`ItemError` if there is none.
    """
    wanted, starts = name.lower(), (f"{key}.", f"{PurePath(key).name}.", ".")
    for start in ("", *map(str.lower, starts)):
        if wanted.startswith(start) and (extension := wanted.removeprefix(start)) in sample:
            return sample[extension]
    raise ItemError(f"{key}: no reference {name} in the sample; name one by its extension: {', '.join(sample)}")


def _references_next_to(shard: Shard, sample: Sample) -> dict[str, Any]:
    """Return the ``references`` in the JSON of a sample whose caption is in a text file.

    Raises :class:`ItemError` if the JSON has references and cannot be read. JSON without them may be damaged.
    """
    place = sample.get("json")
    if place is None or place.file.size > MAX_CAPTION_BYTES:
        return {}
    if f'"{REFERENCES}"'.encode() not in (data := shard.read(place)):
        return {}
    try:
        about = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ItemError(f"{place.name}: cannot be read: {line(error)}") from error
    found = about.get(REFERENCES) if isinstance(about, dict) else None
    # Other values mean something else. A text in place of a list is a slip if it names a file of the sample.
    named = isinstance(found, list) or (isinstance(found, str) and found.lower() in sample)
    return {REFERENCES: found} if found and named else {}


def _of_windows(name: str, value: dict[str, Any], key: str) -> str:
    """Return the caption of the first window of a video."""
    windows = value[WINDOWS]
    if not isinstance(windows, list) or not windows or not isinstance(windows[0], dict):
        raise ItemError(f"{name}: no window; expected a list of objects as {WINDOWS}")
    if key not in windows[0]:
        raise ItemError(f"{name}: no {key} in the first window, only {', '.join(sorted(windows[0]))}")
    return checked(name, windows[0][key], key)
