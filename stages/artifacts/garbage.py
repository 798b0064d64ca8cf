"""Deletion of a slot's files that belong to no artifact, and of a whole slot that nothing reads."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import unseal
from cosmos_rl_core.storage.store import Listed
from stages.artifacts.generations import current_generation, has_begun, invalidate, is_committed
from stages.artifacts.records import Marker, is_record
from stages.artifacts.slots import read_manifest

RENEWED = "renewed"
"""Name of a file that is written only for its date, by which its slot counts as used."""


@dataclass(frozen=True)
class Garbage:
    """Sizes in bytes of files that belong to no artifact, by their path in the slot."""

    old: dict[str, int]
    """Files of attempts that count as ended."""
    young: dict[str, int]
    """Files of attempts that may still be running."""


def garbage(
    slot: str, *, superseded: bool, before_s: float, referred: Callable[[int], bool] = lambda generation: False
) -> Garbage:
    """Return the slot's files that can be deleted. This is the only function that trusts a listing.

    Files that a retry would adopt stay: the finished shards of a generation that is not committed. With ``superseded``
    the files of ended generations can go too; their manifests stay. An attempt counts as ended if it wrote nothing
    since ``before_s``, a time of the store's clock; a generation that was ended since then may still be read. A
    generation that another run refers to (``referred``) stays.
    """
    found = {name: entry for name, entry in store.listed(slot).items() if not store.is_temporary(name)}
    newest = current_generation(slot)
    kept: set[str] = set()
    ended_s: dict[str, float] = {}
    for generation in range(1, newest + 1):
        files = set(_files_of(slot, generation))
        if not superseded or generation == newest or referred(generation):
            kept |= files
        elif (end := found.get(f"invalidated.{generation}.json")) is not None:
            ended_s |= dict.fromkeys(files, end.written_s)
    if not is_committed(slot, newest):
        for name in found:
            is_marker = name.startswith("shards/") and is_record(name.rpartition("/")[2])
            kept.update(_marked(slot, store.join(slot, name)) if is_marker else ())
    attempts = {name: entry for name, entry in found.items() if name.startswith("attempts/")}
    newest_s: dict[str, float] = {}
    for name, entry in attempts.items():
        newest_s[_attempt(name)] = max(entry.written_s, newest_s.get(_attempt(name), 0.0))
    free = Garbage({}, {})
    if is_committed(slot, newest):
        # Scores that were made ahead are of no use to an artifact that has its own.
        for name in sorted(name for name in found if name.startswith("ahead/")):
            (free.old if found[name].written_s <= before_s else free.young)[name] = found[name].size
    for name in sorted(attempts.keys() - kept):
        is_old = max(newest_s[_attempt(name)], ended_s.get(name, 0.0)) <= before_s
        (free.old if is_old else free.young)[name] = attempts[name].size
    return free


def clear(slot: str, attempt: str) -> None:
    """Delete the files of a failed attempt that no retry would adopt."""
    mine = f"attempts/{attempt}/"
    for name in garbage(slot, superseded=False, before_s=float("inf")).old:
        if name.startswith(mine):
            store.remove(store.join(slot, name))


def renew(slot: str) -> None:
    """Date a slot as written now, if there is anything in it. Call it before its artifact is used again.

    Then either :func:`erase` sees the new date, or this caller sees that the generation has ended.
    """
    if has_begun(slot):
        store.write(store.join(slot, RENEWED), secrets.token_bytes(4))


def erase(slot: str, *, before_s: float, wanted: Callable[[], bool]) -> dict[str, int]:
    """Delete the files of a slot, except the ends of its generations; return their sizes by their paths in the slot.

    Deletes nothing if ``wanted()``, or if anything was written since ``before_s``. Both are checked again after the
    generation was ended: a process that looks at the slot from then on makes its artifact again. Manifests go first, so
    that an artifact without all files is never taken for complete; after a kill another call deletes the rest.
    """
    if _is_used(slot, before_s) or wanted():
        return {}
    if has_begun(slot, generation := current_generation(slot)):
        invalidate(slot, generation, "nothing reads it (cosmos-flows data gc)")
    if _is_used(slot, before_s) or wanted():
        return {}
    found = erasable(store.listed(slot))
    sizes = {name: found[name].size for name in sorted(found, key=_manifests_first)}
    for name in sizes:
        store.remove(store.join(slot, name))
    return sizes


def erasable(found: Mapping[str, Listed]) -> dict[str, Listed]:
    """Return the entries of a slot's listing without ends of generations and temporary files."""
    ends = re.compile(r"invalidated\.[0-9]+\.json")
    return {name: entry for name, entry in found.items() if not (ends.fullmatch(name) or store.is_temporary(name))}


def is_young(found: Mapping[str, Listed], before_s: float) -> bool:
    """Return whether any entry was written since ``before_s``."""
    return any(entry.written_s > before_s for entry in found.values())


def _is_used(slot: str, before_s: float) -> bool:
    return is_young(erasable(store.listed(slot)), before_s)


def _manifests_first(name: str) -> tuple[bool, str]:
    return not name.startswith("manifest."), name


def _attempt(name: str) -> str:
    """Return the attempt of a path ``attempts/<attempt>/...``."""
    return name.split("/")[1]


def _files_of(slot: str, generation: int) -> Iterator[str]:
    manifest = read_manifest(slot, generation)
    if manifest is not None:
        yield from (entry.path for entry in manifest.files.values())


def _marked(slot: str, marker: str) -> Iterator[str]:
    body = unseal(store.read(marker), Marker.kind, marker)
    found = Marker.checked(body, marker, slot, body.get("generation", 0))
    yield from (entry.path for entry in found.files.values())
