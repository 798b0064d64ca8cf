"""A folder of images or videos with captions, in one of two layouts.

Flat: ``<stem>.json``, an object whose ``prompt`` is the caption (other keys are ignored), beside the medium of the same
stem. Folders: media in ``images/`` or ``videos/``; captions in ``metas/``, as text in ``<stem>.txt`` or as an object in
``<stem>.json``. Hidden files and other extensions are ignored. The id of an item is its stem, with the number of the
clip if videos give several. Items are sorted by id.
"""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
from PIL import Image, ImageOps
from pydantic import Field, PositiveInt

from cosmos_rl_core.config.base import NOT_IDENTITY
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.storage.file_digests import files_digest

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
VIDEOS = frozenset({".mp4", ".mkv", ".mov", ".webm"})

_ITEM_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_DAMAGED = (OSError, EOFError, ValueError, SyntaxError, IndexError)
_UNREADABLE = (*_DAMAGED, Image.DecompressionBombError, av.FFmpegError)
"""Errors of Pillow and FFmpeg for damaged files."""


class Options(DatasetOptions):
    """Folder, and size of the items."""

    name: Literal["local"] = "local"  # pyright: ignore[reportIncompatibleVariableOverride]

    local_dir: str = Field(json_schema_extra=NOT_IDENTITY)
    """Path of the folder. The identity of a run holds the digest of the files, not the path."""
    size: tuple[PositiveInt, PositiveInt] = (1024, 1024)
    """Height and width in pixels. Media are scaled until they just cover the size, then cropped evenly."""
    frames: int = Field(default=1, ge=1)
    """Number of consecutive frames of an item, at the video's own frame rate; 1 for images."""
    clips: int = Field(default=1, ge=1, le=100)
    """Number of items that each video gives. The first starts at the beginning, the last ends at the end, the
    others are evenly spaced. 1 takes the beginning only."""


@dataclass(frozen=True)
class _Item:
    item_id: str
    medium: Path
    prompt: Prompt
    clip: int = 0


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return each caption once, in the order of the items. Reads and decodes all files.

    Raises one :class:`ConfigError` with every mistake: media without caption or the reverse, unreadable files, videos
    that are too short, names that cannot be ids.
    """
    return tuple(dict.fromkeys(item.prompt for item in _items(options, decode=True)))


def digest(options: Options) -> str:
    """Return the digest of names and bytes of all files. Raises :class:`ConfigError` if the folder is missing."""
    root, (media, captions) = Path(options.local_dir), _find(options.local_dir)
    files = itertools.chain(*media.values(), *captions.values())
    return files_digest({file.relative_to(root).as_posix(): file for file in files})


class Media:
    """Items of the folder, cut to one size, with random access. Damaged files raise when their item is read."""

    def __init__(self, options: Options):
        self._options = options
        self._items = _items(options, decode=False)
        self.prompts = tuple(dict.fromkeys(item.prompt for item in self._items))
        self.item_ids = tuple(item.item_id for item in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def prompt_of(self, index: int) -> Prompt:
        """Return the caption of item ``index``. Raises ``IndexError`` beyond the set."""
        return self._item(index).prompt

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Return item ``index``: uint8 RGB pixels ``[frames, height, width, 3]``, and its caption.

        Raises ``IndexError`` beyond the set, and :class:`ConfigError` with the file's name if it cannot be read.
        """
        item, options = self._item(index), self._options
        pictures = _pictures(item.medium, options, item.clip)
        return np.stack([fit(picture, options.size) for picture in pictures]), item.prompt

    def _item(self, index: int) -> _Item:
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a set of {len(self)}")
        return self._items[index]


def fit(picture: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Scale a picture (bicubic) until it just covers ``size`` (height, width), and return its middle.

    Returns uint8 RGB ``[height, width, 3]``. A picture of that size is unchanged; an odd row or column is cut at the
    bottom or right.
    """
    height, width = size
    scale = max(width / picture.width, height / picture.height)
    across = max(width, round(picture.width * scale))
    down = max(height, round(picture.height * scale))
    left, top = (across - width) // 2, (down - height) // 2
    scaled = picture.resize((across, down), Image.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + width, top + height)), dtype=np.uint8)


def _items(options: Options, *, decode: bool) -> list[_Item]:
    """Return all items by id. Raises :class:`ConfigError` with every mistake; ``decode`` checks the media too."""
    media, captions = _find(options.local_dir)
    items: list[_Item] = []
    mistakes: list[str] = []
    for item_id in sorted(media.keys() | captions.keys()):
        try:
            item = _item(item_id, media.get(item_id, []), captions.get(item_id, []))
            items += [_clip(item, clip, options.clips) for clip in range(options.clips)]
        except ConfigError as error:
            mistakes += str(error).splitlines()
    if decode:
        # Decoding takes most of the time and releases the interpreter lock.
        with ThreadPoolExecutor() as pool:
            files = sorted(itertools.chain(*media.values()))
            mistakes += filter(None, pool.map(_fault, files, itertools.repeat(options)))
    if not media and not captions:
        mistakes.append("no image or video with a caption")
    if mistakes:
        raise mistakes_in(options.local_dir, mistakes)
    return items


def _clip(item: _Item, clip: int, clips: int) -> _Item:
    return item if clips == 1 else replace(item, item_id=f"{item.item_id}-{clip:02d}", clip=clip)


def _find(local_dir: str) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Return media and captions by stem. Raises :class:`ConfigError` if the folder is missing or mixes layouts."""
    root = Path(local_dir)
    if not root.is_dir():
        raise ConfigError(f"no folder at {root}; expected images or videos with captions")
    folders = [root / name for name in ("images", "videos") if (root / name).is_dir()]
    if len(folders) > 1:
        raise ConfigError(f"{root} has both images/ and videos/; expected one of them")
    if folders:
        return _files(folders[0], IMAGES | VIDEOS), _files(root / "metas", {".txt", ".json"})
    return _files(root, IMAGES | VIDEOS), _files(root, {".json"})


def _files(folder: Path, extensions: frozenset[str] | set[str]) -> dict[str, list[Path]]:
    """Return the files with these extensions by stem."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix.lower() in extensions and file.is_file() and not file.name.startswith("."):
            found.setdefault(file.stem, []).append(file)
    return found


def _item(item_id: str, media: list[Path], captions: list[Path]) -> _Item:
    """Return the item of a stem. Raises :class:`ConfigError` with a line for each mistake."""
    name = (media or captions)[0].name
    mistakes = []
    if not _ITEM_ID.fullmatch(item_id):
        mistakes.append(f"{name}: rename it to at most 80 letters, digits, '_', '-' and '.'")
    if not media:
        mistakes.append(f"{name}: no image or video of that name")
    for kind, files in (("medium", media), ("caption", captions)):
        if len(files) > 1:
            found = ", ".join(file.name for file in files)
            mistakes.append(f"{name}: more than one {kind}: {found}")
    text = ""
    try:
        text = _caption(captions[0] if captions else None, name)
    except ConfigError as error:
        mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return _Item(item_id, media[0], Prompt(id=prompt_id(text), text=text))


def _caption(file: Path | None, name: str) -> str:
    """Return the caption in a file, without surrounding white space. Raises :class:`ConfigError` if there is none."""
    if file is None:
        raise ConfigError(f"{name}: no caption")
    try:
        caption: Any = file.read_text(encoding="utf-8-sig")
        if file.suffix.lower() == ".json":
            about = json.loads(caption)
            caption = about.get("prompt") if isinstance(about, dict) else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file.name}: cannot be read: {_line(error)}") from error
    if not isinstance(caption, str):
        raise ConfigError(f'{file.name}: no caption; expected an object with the text "prompt"')
    if not caption.strip():
        raise ConfigError(f"{file.name}: the caption is empty")
    return caption.strip()


def _fault(file: Path, options: Options) -> str | None:
    """Return why a medium cannot be used, or None. Decodes it up to the end of its last clip."""
    try:
        for _ in _pictures(file, options, options.clips - 1):
            pass
    except ConfigError as error:
        return str(error)
    return None


def _pictures(file: Path, options: Options, clip: int) -> Iterator[Image.Image]:
    """Yield the RGB pictures of a clip. Raises :class:`ConfigError` if there are too few."""
    count, start, frames = 0, 0, options.frames
    try:
        if options.clips > 1:
            start = _start(file, options, clip)
        for picture in itertools.islice(_decoded(file), start, start + frames):
            count += 1
            yield picture
    except ConfigError:
        raise
    except _UNREADABLE as error:
        raise ConfigError(f"{file.name}: cannot be read: {_line(error)}") from error
    if count < frames:
        found = f"{start + count} frames, expected at least {start + frames}"
        raise ConfigError(f"{file.name}: {found}")


def _start(file: Path, options: Options, clip: int) -> int:
    """Return the first frame of a clip. Raises :class:`ConfigError` if frames are too few for clips that differ."""
    count = 1
    if file.suffix.lower() in VIDEOS:
        # Without decoding: a packet is a frame.
        with av.open(str(file)) as container:
            count = sum(packet.size > 0 for packet in container.demux(video=0))
    room, last = count - options.frames, options.clips - 1
    if room < last:
        expected = f"{options.frames + last} for {options.clips} clips of {options.frames}"
        raise ConfigError(f"{file.name}: {count} frames, expected at least {expected}")
    return clip * room // last


def _decoded(file: Path) -> Iterator[Image.Image]:
    if file.suffix.lower() in VIDEOS:
        with av.open(str(file)) as container:
            for frame in container.decode(video=0):
                yield frame.to_image().rotate(frame.rotation, expand=True)
        return
    with Image.open(file) as picture:
        if picture.mode.startswith(("I", "F")):
            raise ValueError(f"mode {picture.mode}, expected 8 bits a channel")
        yield ImageOps.exif_transpose(picture).convert("RGB")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
