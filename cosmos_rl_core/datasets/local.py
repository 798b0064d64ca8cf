"""A folder of images or videos with captions, in one of two layouts.

Flat: the caption next to the medium of the same stem, as text in ``<stem>.txt`` or as an object in ``<stem>.json``,
whose ``prompt`` is the caption. Folders: media in ``images/`` or ``videos/``, captions of the same two kinds in
``metas/``. Hidden files, other extensions and other folders are ignored, and so is text without a medium in a flat
folder. The id of an item is its stem, with the number of the clip if videos give several. Items are sorted by id.

An object may have ``references``, a list of the pictures from which an edit made the medium. They are paths relative to
the folder and inside it, in a folder of their own, with any extension. Other keys of the object are ignored.
"""

import itertools
import posixpath
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import BinaryIO, Literal

import numpy as np
from PIL import Image
from pydantic import Field, PositiveInt

from cosmos_rl_core import canonical
from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _clips, _probe
from cosmos_rl_core.datasets._base import Item, ItemError, Picture, Prompt, Reference, prompt_id
from cosmos_rl_core.datasets._files import REFERENCES, kind_of
from cosmos_rl_core.datasets._layout import Files, layout, misfits, no_folder, nothing_in, read_caption
from cosmos_rl_core.datasets._references import References, frame_in, frames_of, places_in
from cosmos_rl_core.errors import ConfigError, UnreadableError, mistakes_in
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.file_digests import files_digest

_READ_AT_ONCE = 16


class Options(DatasetOptions):
    """Folder, and size of the items."""

    name: Literal["local"] = "local"  # pyright: ignore[reportIncompatibleVariableOverride]

    local_dir: UserPath = Field(json_schema_extra=NOT_IDENTITY)
    """Path of the folder. The identity of a run holds the digest of the files, not the path."""
    size: tuple[PositiveInt, PositiveInt] = (1024, 1024)
    """Height and width in pixels. Media are scaled until they just cover the size, then cropped evenly."""
    frames: int = Field(default=1, ge=1)
    """Number of consecutive frames of an item, at the video's own frame rate; 1 for images."""
    clips: int = Field(default=1, ge=1, le=100)
    """Number of items that each video gives. The first starts at the beginning, the last ends at the end, the
    others are evenly spaced. 1 takes the beginning only."""
    first_frame: bool = Field(default=False, json_schema_extra={"neutral": False})
    """The first frame of each item is its reference, for models that make a video of a picture. Planning decodes it."""


@dataclass(frozen=True)
class _Item:
    item_id: str
    medium: Path
    prompt: Prompt
    clip: int = 0


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return each caption once, in the order of the items. Opens references; opens media only for first frames.

    Raises one :class:`ConfigError` with every mistake: media without caption or the reverse, captions that cannot be
    read, names that cannot be ids.
    """
    return _once(_items(options))


def digest(options: Options) -> str:
    """Return the digest of names and bytes of all media and captions, and of the references that these name.

    Raises :class:`ConfigError` if a file cannot be read.
    """
    media, captions = _find(options.local_dir)
    files = {n: Path(options.local_dir, n) for n in itertools.chain(*media.values(), *captions.values())}
    try:
        found, named = files_digest(files), _references(options)
        return canonical.digest({"files": found, "references": named}) if named else found
    except OSError as error:
        raise ConfigError(
            f"{options.local_dir}: {error.filename or 'a file'} cannot be read: {error.strerror}"
        ) from error


def _references(options: Options) -> dict[str, list[str]]:
    """Return the digests of the references of each item that has some. Mistakes are left to :class:`Media`."""
    try:
        items = _items(options)
    except ConfigError:
        return {}
    return {one.item_id: [ref.digest for ref in one.prompt.references] for one in items if one.prompt.references}


class Media:
    """Items of the folder, cut to one size, with random access. Damaged files raise when their item is read."""

    def __init__(self, options: Options):
        self._options = options
        self._items = _items(options)
        self.shape = (options.frames, *options.size)
        self.prompts = _once(self._items)
        self.item_ids = tuple(item.item_id for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def prompt_of(self, index: int) -> Prompt:
        """Return the caption of item ``index``. Raises ``IndexError`` beyond the set."""
        return self._item(index).prompt

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Return item ``index``: uint8 RGB pixels ``[frames, height, width, 3]``, and its caption.

        Raises ``IndexError`` beyond the set, and :class:`ItemError` with the file's name if it cannot be read.
        """
        item, options = self._item(index), self._options
        pictures = _pictures(item.medium, options, item.clip)
        return np.stack([_clips.fit(picture, options.size) for picture in pictures]), item.prompt

    def fault(self, index: int) -> str | None:
        """Return why the medium of item ``index`` is damaged or too short, or None. Decodes one frame of a video."""
        item = self._item(index)
        if item.clip < self._options.clips - 1:
            return None  # the last clip of a medium needs all that the others need
        try:
            _start(item.medium, self._options, item.clip)
        except ItemError as error:
            return str(error)
        return None

    def _item(self, index: int) -> _Item:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a set of {len(self)}")
        return self._items[index]


class Source:
    """Files of the folder, on a local disk or in S3: a unit is an item, named by its stem."""

    def __init__(self, options: Options):
        self._root, self._first_frame, self._size = options.local_dir, options.first_frame, options.size
        self._media: dict[str, list[str]] = {}
        self._captions: dict[str, list[str]] = {}
        self._all_media: frozenset[str] = frozenset()

    def stamps(self) -> dict[str, str]:
        """Return sizes and times, or ETags, of the files of each item, and of the references that captions name.

        Raises :class:`ConfigError` if there is no item.
        """
        try:
            found = store.stamps(self._root)
        except FileNotFoundError as error:
            raise no_folder(self._root) from error
        if not found:
            # An unmounted disk looks like an empty folder, and must not count as the end of all items.
            raise no_folder(self._root)
        self._media, self._captions = layout(self._root, found)
        self._all_media = frozenset(itertools.chain(*self._media.values()))
        if not self._media and not self._captions:
            raise ConfigError(nothing_in(self._root, found))
        units = sorted(self._media.keys() | self._captions.keys())
        named = self._named(found)
        told = {unit: [f"{name} {found[name]}" for name in self._files(unit)] for unit in units}
        return {
            unit: "; ".join([*some, *(f"{place} {found.get(place)}" for place in named.get(unit, ()))])
            for unit, some in told.items()
        }

    def items(self, unit: str) -> list[Item]:
        """Return the one item of a stem. Raises :class:`ItemError` on several files of one kind, or a bad caption."""
        media, captions = self._media.get(unit, []), self._captions.get(unit, [])
        if mistakes := misfits(unit, media, captions):
            raise ItemError("; ".join(mistakes))
        return [Item(unit, kind_of(media[0]), *(read_caption(self._root, captions[0]) if captions else (None, {})))]

    def open(self, name: str) -> BinaryIO:
        """Open the medium of a stem."""
        return store.stream(store.join(self._root, self._media[name][0]))

    def references(self, item: Item) -> list[Picture]:
        """Return the pictures that a caption refers to, or the first frame. Raises :class:`ItemError`."""
        try:
            places = places_in(item.metadata.get(REFERENCES, []))
        except ValueError as error:
            raise ItemError(f"{PurePath(self._captions[item.name][0]).name}: {error}") from error
        if not self._first_frame:
            return [Picture(place, self._picture(place, item.name)) for place in places]
        if places:
            raise ItemError(_twice(self._media[item.name][0]))
        with self.open(item.name) as file:
            return [Picture(f"{self._media[item.name][0]}, frame 0", frame_in(file, item.kind, 0, self._size))]

    def _picture(self, place: str, unit: str) -> bytes:
        root, on_disk = self._root, "://" not in self._root
        path = posixpath.normpath(place)
        outside = path.startswith("/") or path.split("/")[0] == ".."
        if outside or (on_disk and not Path(root, path).resolve().is_relative_to(Path(root).resolve())):
            raise ItemError(f"the reference {place} is outside the folder {root}; put it in a folder there")
        if path in self._all_media and path not in self._media[unit]:
            # The stamp of an item covers its own files, and references that are no item's files, but not this one.
            raise ItemError(f"the reference {place} is the medium of another item; put a copy into a folder of its own")
        try:
            return store.read(store.join(root, path))
        except FileNotFoundError as error:
            raise ItemError(f"no file at {store.join(root, place)}") from error
        except UnreadableError as error:
            raise ItemError(f"{store.join(root, place)} cannot be read: {error}") from error

    def _named(self, found: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the references that the captions of each unit name, if there are files that belong to no item.

        If every file belongs to an item, no caption is read. Captions that cannot be read count as without references.
        """
        if self._first_frame or found.keys() <= self._all_media.union(*self._captions.values()):
            return {}
        captions = {
            name: unit for unit, some in self._captions.items() for name in some if name.lower().endswith(".json")
        }
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            told = zip(captions.values(), pool.map(lambda name: _places(self._root, name), captions), strict=True)
            return {unit: places for unit, places in told if places}

    def _files(self, unit: str) -> list[str]:
        return [*self._media.get(unit, ()), *self._captions.get(unit, ())]


def _once(items: Iterable[_Item]) -> tuple[Prompt, ...]:
    """Return each prompt once: items with equal captions and references of equal bytes have the same prompt."""
    found: dict[str, Prompt] = {}
    for item in items:
        found.setdefault(item.prompt.id, item.prompt)
    return tuple(found.values())


def _items(options: Options) -> tuple[_Item, ...]:
    """Return all items by id, read again if a file has changed. Raises :class:`ConfigError` with every mistake."""
    _find(options.local_dir)
    stamps = tuple(sorted(store.stamps(options.local_dir).items()))
    return _read(options.model_dump_json(), stamps)


@lru_cache(maxsize=4)
def _read(settings: str, _stamps: tuple[tuple[str, str], ...]) -> tuple[_Item, ...]:
    """Return all items. ``_stamps``, which change with the files, are a key of the cache: files are read once only."""
    options = Options.model_validate_json(settings)
    media, captions = _find(options.local_dir)
    items: list[_Item] = []
    mistakes: list[str] = []
    pictures, folder = References(Path(options.local_dir), inside=True), options.local_dir
    for item_id in sorted(media.keys() | captions.keys()):
        try:
            item = _item(pictures, folder, item_id, media.get(item_id, []), captions.get(item_id, []))
            clips = [_clip(item, clip, options.clips) for clip in range(options.clips)]
            items += _with_first_frames(clips, options) if options.first_frame else clips
        except ConfigError as error:
            mistakes += str(error).splitlines()
    if not media and not captions:
        mistakes.append("no image or video with a caption")
    if mistakes:
        raise mistakes_in(options.local_dir, mistakes)
    return tuple(items)


def _clip(item: _Item, clip: int, clips: int) -> _Item:
    return item if clips == 1 else replace(item, item_id=f"{item.item_id}-{clip:02d}", clip=clip)


def _with_first_frames(clips: list[_Item], options: Options) -> list[_Item]:
    """Return the clips of a medium, each with its first frame as its reference.

    Raises :class:`ItemError` for a damaged medium.
    """
    medium, text = clips[0].medium, clips[0].prompt.text
    if clips[0].prompt.references:
        raise ItemError(_twice(medium.name))
    starts = [_first(medium, options, one.clip) for one in clips]
    with _named(medium):
        references = frames_of(medium, starts, options.size)
    prompts = [Prompt(id=prompt_id(text, [one.digest]), text=text, references=(one,)) for one in references]
    return [replace(clip, prompt=prompt) for clip, prompt in zip(clips, prompts, strict=True)]


def _find(local_dir: str) -> tuple[Files, Files]:
    """Return media and captions of a folder by stem.

    Raises :class:`ConfigError` if it is missing, not on a disk or mixes layouts.
    """
    if "://" in local_dir:
        raise ConfigError(
            f"{local_dir} is not on a disk; copy it to one, or prepare a dataset from it (cosmos-flows preprocess) and "
            'name that with name = "snapshot"'
        )
    try:
        return layout(local_dir, store.stamps(local_dir))
    except FileNotFoundError as error:
        raise no_folder(local_dir) from error


def _twice(medium: str) -> str:
    return f"{PurePath(medium).name}: its caption names references; leave first_frame out, or the references"


def _places(local_dir: str, caption: str) -> list[str]:
    """Return the places of the references that a caption names; an empty list if the caption cannot be read."""
    with suppress(ItemError, FileNotFoundError, UnreadableError, ValueError):
        _, values = read_caption(local_dir, caption)
        return [posixpath.normpath(place) for place in places_in(values.get(REFERENCES, []))]
    return []


def _item(pictures: References, local_dir: str, item_id: str, media: list[str], captions: list[str]) -> _Item:
    """Return the item of a stem. Raises :class:`ConfigError` with a line for each mistake."""
    mistakes, text, found = misfits(item_id, media, captions), "", tuple[Reference, ...]()
    try:
        if not captions:
            raise ConfigError(f"{PurePath(media[0]).name}: no caption")
        text, values = read_caption(local_dir, captions[0])
        found = pictures.at(values.get(REFERENCES, []))
    except ConfigError as error:
        mistakes.append(str(error))
    except ValueError as error:
        mistakes.append(f"{PurePath(captions[0]).name}: {error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    prompt = Prompt(id=prompt_id(text, [one.digest for one in found]), text=text, references=found)
    return _Item(item_id, Path(local_dir, media[0]), prompt)


def _pictures(file: Path, options: Options, clip: int) -> Iterator[Image.Image]:
    """Yield the RGB pictures of a clip. Raises :class:`ItemError` if there are too few."""
    start = _first(file, options, clip)
    end, count = start + options.frames, 0
    with _named(file):
        for picture in itertools.islice(_clips.pictures(str(file), kind_of(str(file))), start, end):
            count += 1
            yield picture
        if start + count < end:
            raise ItemError(f"{start + count} frames, expected at least {end}")


def _first(file: Path, options: Options, clip: int) -> int:
    """Return the number of a clip's first frame. Opens the file only if media give several clips, else it is 0."""
    return _start(file, options, clip) if options.clips > 1 else 0


def _start(file: Path, options: Options, clip: int) -> int:
    """Return the number of a clip's first frame. Raises :class:`ItemError` if there are too few frames."""
    with _named(file):
        count = _probe.shape(str(file), kind_of(str(file))).frames
        room, last = count - options.frames, options.clips - 1
        if room < last:
            several = f" for {options.clips} clips of {options.frames}" if last else ""
            raise ItemError(f"{count} frames, expected at least {options.frames + last}{several}")
    return clip * room // last if last else 0


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Put the name of a medium before the messages of errors in the block."""
    try:
        with _clips.damage():
            yield
    except ItemError as error:
        raise ItemError(f"{file.name}: {error}") from error
