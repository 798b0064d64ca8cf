"""The two layouts of a folder of media with captions: the files of each item, by stem."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import PurePath
from typing import Any

from cosmos_rl_core.datasets._files import IMAGES, VIDEOS, caption_in, parsed
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store

Files = dict[str, list[str]]
"""Names of files, relative to the folder, by stem."""

_ITEM_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")


def no_folder(local_dir: str) -> ConfigError:
    """Return the error of a folder that is not there, or has no files."""
    return ConfigError(f"no folder at {local_dir} with files in it; expected images or videos with captions")


def nothing_in(local_dir: str, names: Iterable[str]) -> str:
    """Return why a folder of files has no item, with the folders below it that have media."""
    folders = sorted({str(PurePath(name).parent) for name in names if is_medium(name)})
    below = f"; there are media in {', '.join(folders[:5])}: name one folder" if folders else ""
    return f"no image or video in {local_dir}; expected them there, or in its folder images/ or videos/{below}"


def is_medium(name: str) -> bool:
    """Return whether a file has the extension of an image or video."""
    return PurePath(name).suffix.lower() in IMAGES | VIDEOS


def layout(local_dir: str, names: Iterable[str]) -> tuple[Files, Files]:
    """Return media and captions by stem, given the names of all files, relative to the folder.

    Raises :class:`ConfigError` if the folder has both ``images/`` and ``videos/``.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        by_folder[str(PurePath(name).parent)].append(name)
    folders = [name for name in ("images", "videos") if name in by_folder]
    if len(folders) > 1:
        raise ConfigError(f"{local_dir} has both images/ and videos/; expected one of them")
    media = _by_stem(by_folder[folders[0] if folders else "."], IMAGES | VIDEOS)
    if folders:
        return media, _by_stem(by_folder["metas"], {".txt", ".json"})
    # Text without a medium is a note or a licence.
    others = [name for name in by_folder["."] if name.lower().endswith(".json") or PurePath(name).stem in media]
    return media, _by_stem(others, {".txt", ".json"})


def _by_stem(names: Iterable[str], extensions: Collection[str]) -> Files:
    """Return the names with these extensions by stem."""
    found: Files = {}
    for path in map(PurePath, names):
        if path.suffix.lower() in extensions:
            found.setdefault(path.stem, []).append(str(path))
    return found


def misfits(item_id: str, media: list[str], captions: list[str]) -> list[str]:
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


def read_caption(local_dir: str, file: str) -> tuple[str, dict[str, Any]]:
    """Return the caption in a file and the values next to it. Raises :class:`ItemError` if there is none."""
    name = PurePath(file).name
    return caption_in(name, parsed(name, store.read(store.join(local_dir, file))))
