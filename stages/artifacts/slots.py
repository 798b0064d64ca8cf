"""Slots: which artifact is current, and which of its parts were deleted.

A slot holds ``manifest.1.json``, ``manifest.2.json``, ...; ``invalidated.<n>.json`` ends generation n. The current
generation is the first that is not invalidated, found by probing; :func:`one_look` probes in a listing. Files lie under
``attempts/<attempt id>/``, so that attempts never meet; only layouts, shard markers and manifests are contended for,
each by one put-if-absent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.listing.listings import listed_once
from cosmos_rl_core.storage import store
from cosmos_rl_core.weights.parts import CURRENT
from stages.artifacts.generations import current_generation
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import Dropped, Reference, place_of
from stages.artifacts.request import Input, Request

Found = TypeVar("Found")
_NUMBERED, _SINGLE = ("iterations", "exports"), ("policy", "report", "ledger")
"""Folders of a run that hold numbered folders of slots; and its single slots, with the ledger, whose pages are read
all or none."""


@dataclass
class _Seen:
    """Slots and deleted parts that one look has found."""

    slots: dict[str, tuple[int, Manifest | None]] = field(default_factory=dict[str, tuple[int, Manifest | None]])
    dropped: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Digests of manifests, and parts that were deleted from their artifacts."""
    once: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """Values that :func:`once` has made, by key."""


_SEEN: ContextVar[_Seen | None] = ContextVar("seen", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Look up each slot at most once inside the block, by a listing of its iteration.

    Only for code that makes no artifact. A block inside another block shares its look.
    """
    if _SEEN.get() is not None:
        yield
        return
    token = _SEEN.set(_Seen())
    try:
        with listed_once(_folder_of):
            yield
    finally:
        _SEEN.reset(token)


def _folder_of(url: str) -> str | None:
    """Return the folder of the iteration, or of the policy version, that a file of a run belongs to.

    None for other files: the folders that they lie in grow with the run, or with the store.
    """
    before, runs, inside = url.rpartition("/runs/")
    names = inside.split("/", 4)
    if not runs or len(names) < 2:
        return None
    if names[1] in _NUMBERED and len(names) > 3:
        return f"{before}{runs}{names[0]}/{names[1]}/{names[2]}"
    return f"{before}{runs}{names[0]}/{names[1]}" if names[1] in _SINGLE else None


def current_of(slot: str) -> tuple[int, Manifest | None]:
    """Return the slot's first generation (1, 2, ...) that is not invalidated, and its manifest if it is committed."""
    seen = _SEEN.get()
    if seen is not None and slot in seen.slots:
        return seen.slots[slot]
    generation = current_generation(slot)
    found = generation, read_manifest(slot, generation)
    if seen is not None:
        seen.slots[slot] = found
    return found


def read_manifest(slot: str, generation: int) -> Manifest | None:
    """Read one generation's manifest; None if there is none.

    For a reference, return the manifest that it names, with the slot that holds the files. Raises
    :class:`ArtifactError` if the manifest is damaged, or if something else is in its place.
    """
    url = Manifest.url(slot, generation)
    data = store.read_if_exists(url)
    if data is None:
        return None
    if (reference := Reference.found(data, url, slot, generation)) is not None:
        return _referred(reference, url, slot)
    return Manifest.unsealed(data, url, slot, generation)


def _referred(reference: Reference, url: str, slot: str) -> Manifest:
    """Return the manifest that a reference names."""
    source = reference.source(slot)
    place = Manifest.url(source, reference.made)
    data = store.read_if_exists(place)
    if data is None or sha256(data) != reference.manifest:
        found = "is missing" if data is None else "is another one"
        raise ArtifactError(f"{url} refers to {place}, which {found}; restore it from a copy")
    manifest = Manifest.unsealed(data, place, source, reference.made)
    if manifest.fingerprint != reference.fingerprint:
        raise ArtifactError(f"{url} names another fingerprint than {place} has; restore it from a copy")
    return manifest


def suppose(slot: str, made: Manifest) -> None:
    """Let a look find ``made`` in an empty slot, as after :func:`refer`. Only inside :func:`one_look`."""
    seen = _SEEN.get()
    assert seen is not None
    seen.slots[slot] = 1, made


def refer(slot: str, made: Manifest) -> None:
    """Make the artifact ``made`` current in an empty slot too, by a reference to its files.

    Raises :class:`ArtifactError` if there is another artifact.
    """
    generation, found = current_of(slot)
    if found is None:
        reference = Reference(
            place=place_of(slot),
            generation=generation,
            slot=place_of(made.slot),
            made=made.generation,
            manifest=made.digest,
            fingerprint=made.fingerprint,
        )
        store.put_if_absent(Manifest.url(slot, generation), reference.sealed())
        found = read_manifest(slot, generation)
    if found is None or found.digest != made.digest:
        raise ArtifactError(f"{slot} has another artifact than {made.slot}; expected none")


def named_manifest(source: Input) -> Manifest:
    """Read exactly the manifest that an input names. Raises :class:`ArtifactError` if it is missing or another."""
    seen = _SEEN.get()
    _, current_one = (0, None) if seen is None else seen.slots.get(source.url, (0, None))
    if current_one is not None and current_one.digest == source.manifest:
        return current_one
    url = Manifest.url(source.url, source.generation)
    data = store.read_if_exists(url)
    if data is None or sha256(data) != source.manifest:
        fault = "missing" if data is None else "not the manifest that is named"
        raise ArtifactError(f"{url} is {fault}; restore it from a copy")
    return Manifest.unsealed(data, url, source.url, source.generation)


def current_manifest(request: Request) -> Manifest | None:
    """Return the committed artifact that is current for this Request, or None."""
    _, manifest = current_of(request.slot)
    if manifest is None or why_stale(manifest, request) is not None:
        return None
    return manifest


def why_stale(manifest: Manifest, request: Request) -> str | None:
    """Return why the artifact must be made again: other settings, other inputs, a missing file. None if it is current.

    Raises :class:`ArtifactError` if a file has another size: wrong bytes are never rebuilt silently.
    """
    if (reason := manifest.why_not(request)) is not None:
        return reason
    urls = [store.join(manifest.slot, entry.path) for entry in manifest.files.values()]
    for (name, entry), url, found in zip(manifest.files.items(), urls, store.sizes(urls), strict=True):
        if found is None and is_dropped(manifest, name.partition("/")[0]):
            continue
        if found is None:
            return f"{name} is missing ({url})"
        if found != entry.size:
            raise ArtifactError(
                f"{url} has {found} bytes, its manifest says {entry.size}; restore it, or invalidate the artifact"
            )
    return None


def drop(slot: str, *parts: str, held: Callable[[], bool] = lambda: False) -> None:
    """Delete parts of the current artifact for good. The artifact stays current; reading the parts raises an error.

    Each part's record is written before its files are removed: after a kill in between, another call removes the rest.
    ``held`` returns whether somebody else has asked for the artifact. It is also called between the two: if a drop and
    a request come at the same time, one sees the other. Parts of a reference belong to another run: they stay.
    """
    generation, manifest = current_of(slot)
    if manifest is None or manifest.slot != slot or held():
        return
    for part in parts:
        if not manifest.has_part(part) or _is_gone(manifest, part):
            continue
        record = Dropped(place=place_of(slot), generation=generation, manifest=manifest.digest, part=part)
        store.put_if_absent(Dropped.url(slot, generation, part), record.sealed())
        if held():
            store.remove(Dropped.url(slot, generation, part))
        elif is_dropped(manifest, part):
            for name, entry in manifest.files.items():
                if name.startswith(f"{part}/"):
                    store.remove(store.join(slot, entry.path))


def _is_gone(manifest: Manifest, part: str) -> bool:
    """Return whether a part was deleted, and nothing is left of it."""
    urls = [
        store.join(manifest.slot, entry.path) for name, entry in manifest.files.items() if name.startswith(f"{part}/")
    ]
    return not any(size is not None for size in store.sizes(urls)) and is_dropped(manifest, part)


def is_dropped(manifest: Manifest, part: str) -> bool:
    """Return whether a part of an artifact was deleted for good.

    Raises :class:`ArtifactError` if the record is damaged or of another manifest.
    """
    seen = _SEEN.get()
    if seen is not None and (manifest.digest, part) in seen.dropped:
        return True
    found = Dropped.read(manifest.slot, manifest.generation, part)
    if found is not None and (found.manifest, found.part) != (manifest.digest, part):
        url = Dropped.url(manifest.slot, manifest.generation, part)
        raise ArtifactError(f"{url} is of another manifest than the one next to it, or of another part; restore both")
    if seen is not None and found is not None:
        seen.dropped.add((manifest.digest, part))
    return found is not None


def once(key: tuple[object, ...], make: Callable[[], Found]) -> Found:
    """Return the value of ``make``, which a look calls once for each key. Only for values that nobody changes."""
    if (seen := _SEEN.get()) is None:
        return make()
    if key not in seen.once:
        seen.once[key] = make()
    return seen.once[key]


def folder_of(slot: str) -> str:
    """Return the URL of the folder that a slot is in."""
    return slot.rstrip("/").rpartition("/")[0]


def input_of(slot: str, *parts: str) -> Input:
    """Return the slot's current artifact as an input: the named parts, or all of it if none is named.

    Parts that it does not have are left out. A policy that has none of them gives ``current``: at version 0 all copies
    are equal. Raises :class:`ArtifactError` if there is no artifact.
    """
    _, manifest = current_of(slot)
    if manifest is None:
        raise ArtifactError(f"{slot} has no artifact yet")
    return once((slot, manifest.digest, parts), lambda: _input_of(manifest, parts))


def _input_of(manifest: Manifest, parts: tuple[str, ...]) -> Input:
    found = tuple(part for part in parts if manifest.has_part(part))
    if not found and manifest.has_part(CURRENT):
        found = (CURRENT,) * bool(parts)
    return Input(
        url=manifest.slot,
        generation=manifest.generation,
        manifest=manifest.digest,
        fingerprint=manifest.fingerprint,
        content=manifest.part_content(*found),
        parts=found,
    )
