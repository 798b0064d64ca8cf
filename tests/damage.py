"""What can be wrong with a file of JSON, and which files a piece of work reads: for tests of damage."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from cosmos_rl_core.canonical import canonical_json, digest

_watching: list[tuple[str, set[str]]] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watching and isinstance(arguments[0], str):
        for root, found in _watching:
            if arguments[0].startswith(root) and "r" in (arguments[1] or "r"):
                found.add(arguments[0].removeprefix(root).lstrip("/"))


@contextmanager
def files_read(root: Path) -> Iterator[set[str]]:
    """Paths below a folder that are opened to be read meanwhile, in this process."""
    if not any(hook is _hear for hook in _hooks):
        sys.addaudithook(_hear)
        _hooks.append(_hear)
    found: set[str] = set()
    _watching.append((str(root.resolve()), found))
    try:
        yield found
    finally:
        _watching.pop()
        found -= {name for name in found if not (root / name).is_file()}


_hooks: list[Callable[..., None]] = []
"""An audit hook stays for the life of the process."""


def flipped(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the file with each value changed, every fourth lost, one more in each object, bytes changed and cut off.

    Only the first and the last element of a list are changed or lost.
    """
    whole = json.loads(data)
    for number, (path, value) in enumerate(list(_leaves(whole))):
        for name in ("changed", "lost") if number % 4 == 0 else ("changed",):
            copy = deepcopy(whole)
            _set(copy, path, _other(value), lost=name == "lost")
            yield f"{'.'.join(map(str, path))} {name}", canonical_json(copy)
    for path in list(_objects(whole)):
        copy = deepcopy(whole)
        _at(copy, path)["one more"] = 1
        yield f"{'.'.join(map(str, path))} with one more", canonical_json(copy)
    step = max(1, len(data) // 8)
    for place in range(0, len(data), step):
        yield f"byte {place}", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        yield f"cut at {place}", data[:place]
    yield "one more byte", data + b" "
    yield "no JSON", b"\xff\xfe"


def resealed(data: bytes, fields: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """The file with each of these fields of its body changed, and lost, under a digest that is right again."""
    body = json.loads(data)["body"]
    for field in fields:
        for name, changed in (("changed", body | {field: _other(body.get(field))}), ("lost", _without(body, field))):
            yield f"{field} {name}, resealed", canonical_json({"body": changed, "sha256": digest(changed)})


def _without(body: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != field}


def _other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return 1 if value is None else not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return f"{value[:-1]}{'0' if value.endswith('1') else '1'}"
    return {"other": 1} if isinstance(value, dict) else ["other"]


def _children(value: Any) -> list[tuple[Any, Any]]:
    """Return all children of an object; the first and the last of a list, whose elements are alike."""
    if isinstance(value, dict):
        return list(value.items())
    places = sorted({0, len(value) - 1}) if isinstance(value, list) and value else []
    return [(place, value[place]) for place in places]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    children = _children(value)
    if not children and path:
        yield path, value
    for key, child in children:
        yield from _leaves(child, (*path, key))


def _objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        yield path
    for key, child in _children(value):
        yield from _objects(child, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _set(value: Any, path: tuple[Any, ...], change: Any, *, lost: bool) -> None:
    parent = _at(value, path[:-1])
    if lost:
        del parent[path[-1]]
    else:
        parent[path[-1]] = change
