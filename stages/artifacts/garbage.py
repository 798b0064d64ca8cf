"""Files of a slot that belong to no artifact: what killed attempts and lost races left."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import unseal
from cosmos_rl_core.storage.store import Listed
from stages.artifacts.generations import current_generation, is_committed
from stages.artifacts.records import Marker
from stages.artifacts.slots import read_manifest


@dataclass(frozen=True)
class Garbage:
    """Sizes in bytes of files that belong to no artifact, by their path in the slot."""

    old: dict[str, int]
    """Files of attempts that count as ended."""
    young: dict[str, int]
    """Files of attempts that may still be running."""


def garbage(slot: str, *, superseded: bool, before_s: float) -> Garbage:
    """Return the slot's files that can be deleted. This is the only function that trusts a listing.

    Files that a retry would adopt stay: the finished shards of a generation that is not committed. With ``superseded``
    the files of ended generations can go too; their manifests stay. An attempt counts as ended if it wrote nothing
    since ``before_s``, a time of the store's clock; a generation that was ended since then may still be read.
    """
    found = {name: entry for name, entry in store.listed(slot).items() if not store.is_temporary(name)}
    standing = current_generation(slot)
    kept: set[str] = set()
    ended_s: dict[str, float] = {}
    for name in found:
        if (generation := _generation(name)) is None:
            continue
        files = set(_files_of(slot, generation))
        if not superseded or generation >= standing:
            kept |= files
        elif (end := found.get(f"invalidated.{generation}.json")) is not None:
            ended_s |= dict.fromkeys(files, end.written_s)
    if not is_committed(slot, standing):
        kept |= {path for name in found if name.startswith("shards/") for path in _marked(slot, store.join(slot, name))}
    newest_s = _newest_s(found)
    free = {name: entry for name, entry in found.items() if name.startswith("attempts/") and name not in kept}
    old = {name for name in free if max(newest_s[_attempt(name)], ended_s.get(name, 0.0)) <= before_s}
    sizes = {name: entry.size for name, entry in free.items()}
    return Garbage(
        {name: size for name, size in sizes.items() if name in old},
        {name: size for name, size in sizes.items() if name not in old},
    )


def clear(slot: str, attempt: str) -> None:
    """Delete the files of a failed attempt that no retry would adopt."""
    mine = f"attempts/{attempt}/"
    for name in garbage(slot, superseded=False, before_s=float("inf")).old:
        if name.startswith(mine):
            store.remove(store.join(slot, name))


def _attempt(name: str) -> str:
    """Return the attempt of a path ``attempts/<attempt>/...``."""
    return name.split("/")[1]


def _newest_s(found: Mapping[str, Listed]) -> dict[str, float]:
    """Return when each attempt wrote last."""
    newest_s: dict[str, float] = {}
    for name, entry in found.items():
        if name.startswith("attempts/"):
            newest_s[_attempt(name)] = max(entry.written_s, newest_s.get(_attempt(name), 0.0))
    return newest_s


def _generation(name: str) -> int | None:
    """Return the generation of ``manifest.<n>.json``; None for other names."""
    first, _, rest = name.partition(".")
    number = rest.removesuffix(".json")
    return int(number) if first == "manifest" and number.isdecimal() else None


def _files_of(slot: str, generation: int) -> Iterator[str]:
    manifest = read_manifest(slot, generation)
    if manifest is not None and not manifest.referred:
        yield from (entry.path for entry in manifest.files.values())


def _marked(slot: str, marker: str) -> Iterator[str]:
    body = unseal(store.read(marker), Marker.kind, marker)
    found = Marker.checked(body, marker, slot, body.get("generation", 0))
    yield from (entry.path for entry in found.files.values())
