"""Files of prompts: a prompt per line of ``.txt``, an object per line of ``.jsonl``, a list of objects in ``.json``."""

import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.datasets._references import References
from cosmos_rl_core.errors import ConfigError, mistakes_in

FORMATS = (".txt", ".jsonl", ".json")
_PAGE = re.compile(r"\s*<(!doctype\s+html|html)\b", re.IGNORECASE)


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Return the prompts of a file, or of a folder of files with one prompt each, in the order of their names.

    Raises like :func:`prompts_in`, and if there is no file.
    """
    if not path.is_dir():
        return prompts_in(path, _bytes(path))
    mistakes: list[str] = []
    values = list(_files_in(path, mistakes))
    if not values and not mistakes:
        mistakes.append("no file with a prompt; expected .txt with a text or .json with an object")
    return prompts_of(path, values, mistakes)


def _files_in(folder: Path, mistakes: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each file of a folder: an object in ``.json``, a text in ``.txt``.

    Add a message to ``mistakes`` for each file that has no prompt.
    """
    for path in sorted(folder.iterdir()):
        kind = path.suffix.lower()
        if kind not in (".txt", ".json") or path.name.startswith(".") or not path.is_file():
            continue
        try:
            with _named(path):
                text = _text(path, _bytes(path))
        except ConfigError as error:
            mistakes.append(str(error))
            continue
        value = {"prompt": text} if kind == ".txt" else _object(text)
        if not text.strip():
            mistakes.append(f"{path.name}: an empty file; expected one prompt")
        elif isinstance(value, list):
            mistakes.append(
                f"{path.name}: a list; in a folder each file has one prompt. Name the file itself as `path`"
            )
        else:
            yield path.name, value


def read_rows(path: Path) -> tuple[list[tuple[str, Prompt]], list[str]]:
    """Return place and prompt of each valid row of a file, in file order, with duplicates, and all mistakes in others.

    Raises like :func:`read_prompts` if the file cannot be read at all.
    """
    mistakes: list[str] = []
    with _named(path):
        rows = _rows(path, _values(path.suffix.lower(), _text(path, _bytes(path))), mistakes)
        return [(place, prompt) for place, prompt, _ in rows], mistakes


def _bytes(path: Path) -> bytes:
    if path.suffix.lower() not in FORMATS or not path.is_file():
        raise ConfigError(f"no prompt file at {path}; expected one of {', '.join(FORMATS)}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def prompts_in(path: Path, data: bytes) -> tuple[Prompt, ...]:
    """Return the prompts in the bytes of a file, in file order, without surrounding white space and blank lines.

    Raises one :class:`ConfigError` with every mistake in the file.
    """
    with _named(path):
        return prompts_of(path, _values(path.suffix.lower(), _text(path, data)))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn errors of bytes that are not text or not JSON into a :class:`ConfigError` that names the file."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _text(path: Path, data: bytes) -> str:
    text = io.StringIO(data.decode("utf-8-sig"), newline=None).read()
    if _PAGE.match(text):
        raise ConfigError(f"{path} is a web page, as a download that failed leaves it; expected prompts")
    return text


def prompts_of(source: str | Path, values: Iterable[tuple[str, Any]], others: Iterable[str] = ()) -> tuple[Prompt, ...]:
    """Return the prompts of JSON objects, each given with its place in the source.

    The text ``prompt`` of an object is its prompt. The list ``references`` has paths of pictures, relative to the file
    or folder, or spans of other files. Its other values are metadata, and so are values of an object ``metadata`` in
    it. Equal texts with equal references and metadata are one prompt, whose samples are one group. Raises one
    :class:`ConfigError` with every mistake, ``others`` first.
    """
    mistakes = [*others]
    prompts: dict[str, Prompt] = {}
    for _, prompt, longer in _rows(source, values, mistakes):
        known = prompts.get(prompt.id)
        if known is not None and known.metadata != prompt.metadata:
            prompts.setdefault(longer, prompt.model_copy(update={"id": longer}))
        prompts.setdefault(prompt.id, prompt)
    if not mistakes and not prompts:
        mistakes.append("holds no prompt")
    if mistakes:
        raise mistakes_in(source, mistakes)
    return tuple(prompts.values())


def _rows(
    source: str | Path, values: Iterable[tuple[str, Any]], mistakes: list[str]
) -> Iterator[tuple[str, Prompt, str]]:
    """Yield place and prompt of each object, and the id for equal texts with different metadata; collect mistakes."""
    folder = source if isinstance(source, Path) else None
    pictures = References(folder.parent if folder and not folder.is_dir() else folder)
    for place, value in values:
        try:
            text, metadata, places = _taken_apart(value)
            references = pictures.at(places)
            digests = [reference.digest for reference in references]
            name, longer = (prompt_id(t, digests) for t in (text, text + canonical_json(metadata).decode()))
        except (ValueError, RecursionError) as error:  # also NaN, or half a surrogate pair
            mistakes.append(f"{place}: {error}")
            continue
        yield place, Prompt(id=name, text=text, metadata=metadata, references=references), longer


def _taken_apart(value: Any) -> tuple[str, dict[str, Any], Any]:
    """Return text, metadata and places of references of an object. Raises ``ValueError`` if it has another form."""
    text = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError('expected an object with the text "prompt"')
    metadata = {name: other for name, other in value.items() if name not in ("prompt", "references")}
    if isinstance(inner := metadata.get("metadata"), dict):
        del metadata["metadata"]
        if twice := sorted(inner.keys() & metadata.keys()):
            raise ValueError(f'{", ".join(twice)} next to "metadata" and in it; expected one of the two')
        metadata |= inner
    return text.strip(), metadata, value.get("references", [])


def _values(extension: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and JSON value of each prompt. A line of text is the object of that prompt.

    Raises ``ValueError`` if the file is not JSON.
    """
    if extension == ".json":
        values = json.loads(text)
        if not isinstance(values, list):
            raise ValueError("expected a list of objects")
        yield from ((f"entry {number}", value) for number, value in enumerate(values, 1))
        return
    read = _object if extension == ".jsonl" else lambda line: {"prompt": line}
    # One at a time: a million objects take more memory than their prompts.
    lines = enumerate(map(str.strip, text.split("\n")), 1)
    yield from ((f"line {number}", read(line)) for number, line in lines if line)


def _object(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
