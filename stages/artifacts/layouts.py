"""Layouts: how work is divided, and the checks of a committed layout and of finished shards against it."""

import json
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import shards

Item = TypeVar("Item")
Check = Callable[[dict[str, bytes]], str | None]
"""Function that returns why the files of a shard, by name, do not fit its layout; None if they do."""


def difference(found: dict[str, Any], computed: dict[str, Any]) -> str | None:
    """Return why two layouts divide different work; None if they divide the same.

    The divisions, and how many samples are in memory at once, may differ: other memory settings, or later code, compute
    other sizes. The samples and their order may not.
    """
    if found.keys() != computed.keys():
        return f"it has {', '.join(sorted(found))}, expected {', '.join(sorted(computed))}"
    for name, expected in computed.items():
        if isinstance(expected, int):
            if type(found[name]) is not int or found[name] < 1:
                return f"{name} is {found[name]!r}, expected a number of samples"
        elif _uncut(found[name]) != _uncut(expected):
            return f"{name} are not the planned ones, each once and in order"
    return None


def cut(items: list[Item], size: int) -> list[list[Item]]:
    """Divide a list into consecutive parts of ``size``; the last may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def cut_alike(items: Sequence[Item], size: int, kind: Callable[[Item], Any]) -> list[list[Item]]:
    """Divide a list into parts of at most ``size`` items of one kind.

    Kinds follow each other in the order of their first items, and items of a kind stay in order. So the order of all
    items is the same for every ``size``.
    """
    kinds: dict[Any, list[Item]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    return [part for alike in kinds.values() for part in cut(alike, size)]


def evenly(items: list[Item], count: int) -> list[list[Item]]:
    """Divide a list into ``count`` consecutive parts whose sizes differ by 1 at most."""
    bounds = [len(items) * part // count for part in range(count + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]


def holds(names: Collection[str], ids: Sequence[str]) -> Check:
    """Check that a shard has exactly the files ``names``, and that each, a tar or a JSON table, holds exactly these
    samples.
    """

    def check(files: dict[str, bytes]) -> str | None:
        if files.keys() != {*names}:
            return f"it marks {', '.join(sorted(files))}, expected {', '.join(sorted(names))}"
        for name, data in files.items():
            try:
                found = _ids_of(name, data)
            except (ArtifactError, ValueError, TypeError, KeyError) as error:
                return f"{name} is no list of samples ({error})"
            missing, unknown = sorted({*ids} - found), sorted(found - {*ids})
            if missing or unknown:
                return f"{name} lacks {_some(missing)} of the layout's samples, and has {_some(unknown)} in addition"
        return None

    return check


def _ids_of(name: str, data: bytes) -> set[str]:
    if name.endswith(".tar"):
        return {member.rpartition(".")[0] for member in shards.unpack(data)}
    return {row["sample_id"] for row in json.loads(data)}


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "") if ids else "none"


def _uncut(value: Any) -> Any:
    """Flatten the innermost division of a list of ids; None if it has an empty part."""
    if not isinstance(value, list) or not any(isinstance(piece, list) for piece in value):
        return value
    if not all(isinstance(piece, list) and piece for piece in value):
        return None
    if any(isinstance(inner, list) for piece in value for inner in piece):
        return [_uncut(piece) for piece in value]
    return [one for piece in value for one in piece]
