"""A folder of images or videos with captions, in one of two layouts.

Flat: the caption next to the medium of the same stem, as text in ``<stem>.txt`` or as an object in ``<stem>.json``,
whose ``prompt`` is the caption. Folders: media in ``images/`` or ``videos/``, captions of the same two kinds in
``metas/``. Hidden files, other extensions and other folders are ignored, and so is text without a medium in a flat
folder. The id of an item is its stem, with the number of the clip if videos give several. Items are sorted by id.

An object may have ``references``, a list of pictures that an edit begins with and whose result the medium is: their
paths, relative to the folder and inside it, in a folder of their own. Its other keys are ignored.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import Image
from pydantic import Field, PositiveInt

from cosmos_rl_core import canonical
from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _clips, _probe
from cosmos_rl_core.datasets._base import Item, ItemError, Prompt, Reference, prompt_id
from cosmos_rl_core.datasets._files import IMAGES, VIDEOS, caption_in, kind_of, parsed
from cosmos_rl_core.datasets._references import References, frames_of
from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.file_digests import files_digest

Files = dict[str, list[str]]
"""Names of files, relative to the folder, by stem."""

_ITEM_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")


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
    """Return each caption once, in the order of the items. Opens references, and media for first frames alone.

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
    """Return the digests of the references of each item that has some. :class:`Media` raises what is wrong with any."""
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
        """Return why the medium of item ``index`` is damaged or too short, or None. Of a video one frame is decoded."""
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
        self._root = options.local_dir
        self._media: dict[str, list[str]] = {}
        self._captions: dict[str, list[str]] = {}

    def stamps(self) -> dict[str, str]:
        """Return sizes and times, or ETags, of the files of each item. Raises :class:`ConfigError` on no item."""
        try:
            found = store.stamps(self._root)
        except FileNotFoundError as error:
            raise _no_folder(self._root) from error
        if not found:
            # A disk that is not mounted must not end every item.
            raise _no_folder(self._root)
        self._media, self._captions = _layout(self._root, found)
        if not self._media and not self._captions:
            raise ConfigError(_nothing_in(self._root, found))
        units = sorted(self._media.keys() | self._captions.keys())
        return {unit: "; ".join(f"{name} {found[name]}" for name in self._files(unit)) for unit in units}

    def items(self, unit: str) -> list[Item]:
        """Return the one item of a stem. Raises :class:`ItemError` on several files of one kind, or a bad caption."""
        media, captions = self._media.get(unit, []), self._captions.get(unit, [])
        if mistakes := _misfits(unit, media, captions):
            raise ItemError("; ".join(mistakes))
        return [Item(unit, kind_of(media[0]), *(_caption(self._root, captions[0]) if captions else (None, {})))]

    def open(self, name: str) -> BinaryIO:
        """Open the medium of a stem."""
        return store.stream(store.join(self._root, self._media[name][0]))

    def _files(self, unit: str) -> list[str]:
        return [*self._media.get(unit, ()), *self._captions.get(unit, ())]


def _once(items: Iterable[_Item]) -> tuple[Prompt, ...]:
    """Return each prompt once: equal captions with pictures of equal bytes are one, whichever files hold these."""
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
    """Return all items. ``_stamps`` are of the files, which are opened for references: once for all that ask."""
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
        raise ItemError(f"{medium.name}: its caption names references; leave first_frame out, or the references")
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
        return _layout(local_dir, store.stamps(local_dir))
    except FileNotFoundError as error:
        raise _no_folder(local_dir) from error


def _no_folder(local_dir: str) -> ConfigError:
    return ConfigError(f"no folder at {local_dir} with files in it; expected images or videos with captions")


def _nothing_in(local_dir: str, names: Iterable[str]) -> str:
    """Return why a folder of files has no item, with the folders below it that have media."""
    folders = sorted({str(PurePath(name).parent) for name in names if _is_medium(name)})
    below = f"; there are media in {', '.join(folders[:5])}: name one folder" if folders else ""
    return f"no image or video in {local_dir}; expected them there, or in its folder images/ or videos/{below}"


def _is_medium(name: str) -> bool:
    return PurePath(name).suffix.lower() in IMAGES | VIDEOS


def _layout(local_dir: str, names: Iterable[str]) -> tuple[Files, Files]:
    """Return media and captions by stem, given the names of all files, relative to the folder."""
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_folder[str(PurePath(name).parent)].append(name)
    folders = [name for name in ("images", "videos") if name in by_folder]
    if len(folders) > 1:
        raise ConfigError(f"{local_dir} has both images/ and videos/; expected one of them")
    media = _by_stem(by_folder[folders[0] if folders else "."], IMAGES | VIDEOS)
    if folders:
        return media, _by_stem(by_folder["metas"], {".txt", ".json"})
    # Text beside no medium is a note or a licence.
    beside = [name for name in by_folder["."] if name.lower().endswith(".json") or PurePath(name).stem in media]
    return media, _by_stem(beside, {".txt", ".json"})


def _by_stem(names: Iterable[str], extensions: Collection[str]) -> Files:
    """Return the names with these extensions by stem."""
    found: Files = {}
    for path in map(PurePath, names):
        if path.suffix.lower() in extensions:
            found.setdefault(path.stem, []).append(str(path))
    return found


def _item(pictures: References, local_dir: str, item_id: str, media: list[str], captions: list[str]) -> _Item:
    """Return the item of a stem. Raises :class:`ConfigError` with a line for each mistake."""
    mistakes, text, found = _misfits(item_id, media, captions), "", tuple[Reference, ...]()
    try:
        if not captions:
            raise ConfigError(f"{PurePath(media[0]).name}: no caption")
        text, values = _caption(local_dir, captions[0])
        found = pictures.at(values.get("references", []))
    except ConfigError as error:
        mistakes.append(str(error))
    except ValueError as error:
        mistakes.append(f"{PurePath(captions[0]).name}: {error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    prompt = Prompt(id=prompt_id(text, [one.digest for one in found]), text=text, references=found)
    return _Item(item_id, Path(local_dir, media[0]), prompt)


def _misfits(item_id: str, media: list[str], captions: list[str]) -> list[str]:
    """Return why the files of a stem are no item, a line for each mistake."""
    name = PurePath((media or captions)[0]).name
    mistakes = []
    if not _ITEM_ID.fullmatch(item_id):
        mistakes.append(f"{name}: rename it to at most 80 letters, digits, '_', '-' and '.'")
    if not media:
        mistakes.append(f"{name}: no image or video of that name")
    for kind, files in (("medium", media), ("caption", captions)):
        if len(files) > 1:
            mistakes.append(f"{name}: more than one {kind}: {', '.join(PurePath(file).name for file in files)}")
    return mistakes


def _caption(local_dir: str, file: str) -> tuple[str, dict[str, Any]]:
    """Return the caption in a file and the values beside it. Raises :class:`ItemError` if there is none."""
    name = PurePath(file).name
    return caption_in(name, parsed(name, store.read(store.join(local_dir, file))))


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
    """Return the first frame of a clip: 0 of a medium of one clip, unopened. Raises like :func:`_start`."""
    return _start(file, options, clip) if options.clips > 1 else 0


def _start(file: Path, options: Options, clip: int) -> int:
    """Return the first frame of a clip. Raises :class:`ItemError` if frames are too few for clips that differ."""
    with _named(file):
        count = _probe.shape(str(file), kind_of(str(file))).frames
        room, last = count - options.frames, options.clips - 1
        if room < last:
            several = f" for {options.clips} clips of {options.frames}" if last else ""
            raise ItemError(f"{count} frames, expected at least {options.frames + last}{several}")
    return clip * room // last if last else 0


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Put the name of a medium before the reason why it cannot be used."""
    try:
        with _clips.damage():
            yield
    except ItemError as error:
        raise ItemError(f"{file.name}: {error}") from error
