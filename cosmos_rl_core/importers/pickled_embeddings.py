"""Conversion of text embeddings that cosmos-rl's scripts pickled to safetensors files. Nothing is unpickled.

A folder has ``t5_xxl/<stem>.pickle`` or ``text_embedding/<stem>.pickle``, each a list with one array, or tar shards
whose members are ``<key>.pickle``, each a list with a dict of arrays for each window of a video.
"""

import errno
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from cosmos_rl_core.canonical import canonical_json, sha256
from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.importers._pickled_arrays import PickleError, arrays_in
from cosmos_rl_core.storage import store, tars

FOLDERS = ("t5_xxl", "text_embedding")
CAPTIONS = "metas"
INDEX = "index.json"
MAX_BYTES = 2**28
"""Largest pickle that is read: twice an embedding of Cosmos-Reason1, [512, 100352] in float16."""

_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_ENDINGS = (".pickle", ".pkl")


def import_embeddings(folder: Path, target: Path) -> dict[str, Any]:
    """Write ``<stem>.safetensors`` to ``target`` for each pickle of a folder; return its ``index.json``.

    Tensors are named by their place: ``0`` is the array of a list, ``0.embeddings`` one in a dict of it. The index has
    for each stem the file's sha256, the tensors with type and shape, the other values, and the sha256 of the caption
    ``metas/<stem>.txt``, without white space around it, or null. In shards, stems are ``<shard>/<key>``.

    Raises one :class:`ConfigError` with every pickle that holds something else, and then writes nothing.
    """
    if target.exists():
        raise _there_already(target)
    place = _place(folder)
    # Of this call alone: another one may write for the same target.
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    index: dict[str, Any] = {}
    mistakes: list[str] = []
    try:
        for stem, found in _pickles(place):
            if isinstance(found, str) or stem in index:
                mistakes.append(f"{stem}: {found if isinstance(found, str) else 'comes twice'}")
                continue
            try:
                index[stem] = _converted(found, partial / f"{stem}.safetensors")
                index[stem]["caption_sha256"] = _caption_digest(folder / CAPTIONS / f"{stem}.txt")
            except PickleError as error:
                mistakes.append(f"{stem}: {error}")
        if not index and not mistakes:
            mistakes.append(f"no file; expected <stem>{_ENDINGS[0]} or tars with them")
        if mistakes:
            raise mistakes_in(place, mistakes)
        store.write(str(partial / INDEX), canonical_json(index))
        _give_name(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def _give_name(partial: Path, target: Path) -> None:
    """Rename a folder, unless another process was first."""
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise _there_already(target) from error


def _there_already(target: Path) -> ConfigError:
    return ConfigError(f"{target} exists already; name a folder that does not")


def _place(folder: Path) -> Path:
    """Return the folder of the embeddings."""
    found = [folder / name for name in FOLDERS if (folder / name).is_dir()]
    if len(found) != 1:
        several = " and ".join(place.name for place in found) or "neither"
        raise ConfigError(f"{folder} has {several}; expected one of the folders {', '.join(FOLDERS)}")
    return found[0]


def _pickles(place: Path) -> Iterator[tuple[str, bytes | str]]:
    """Yield stem and bytes of each pickle, or why it is not read."""
    for path in sorted(place.iterdir()):
        if path.suffix in _ENDINGS and path.is_file():
            yield path.stem, _refusal(path.stem, path.stat().st_size) or path.read_bytes()
        elif path.suffix == ".tar" and path.is_file():
            yield from _members(path)


def _members(path: Path) -> Iterator[tuple[str, bytes | str]]:
    try:
        with path.open("rb") as shard:
            for name, start, size in tars.files(shard):
                key, dot, ending = name.partition(".")
                if f"{dot}{ending}" not in _ENDINGS:
                    continue
                shard.seek(start)
                yield f"{path.stem}/{key}", _refusal(key, size) or _refusal(path.stem, 0) or shard.read(size)
    except tars.TarError as error:
        yield path.name, str(error)


def _refusal(stem: str, size: int) -> str | None:
    """Return why a pickle is not read at all."""
    if not _STEM.fullmatch(stem):
        return "rename it to at most 80 letters, digits, '_', '-' and '.'"
    return f"{size} bytes, at most {MAX_BYTES} are read" if size > MAX_BYTES else None


def _converted(data: bytes, path: Path) -> dict[str, Any]:
    arrays, values = arrays_in(data)
    if not arrays:
        raise PickleError("no array")
    saved = save(arrays)
    store.write(str(path), saved)
    tensors = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
    return {"sha256": sha256(saved), "tensors": tensors, "values": values}


def _caption_digest(path: Path) -> str | None:
    """Return the digest of a caption, as datasets read it; None if there is none."""
    if not path.is_file():
        return None
    try:
        return sha256(path.read_bytes().decode("utf-8-sig").strip().encode())
    except UnicodeDecodeError as error:
        raise PickleError(f"its caption {path} is not UTF-8") from error
