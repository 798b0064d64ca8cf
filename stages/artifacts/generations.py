"""The generations of a slot: which one is current, and how one is ended."""

import itertools

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from stages.artifacts.records import Invalidated, place_of

_KINDS = ("manifest", "layout", Invalidated.kind)
"""Kinds of records that a generation has only if the generation before it was ended."""


def current_generation(slot: str) -> int:
    """Return the slot's first generation that has not been ended, without reading its manifest and layout.

    Raises :class:`ArtifactError` if the end of an earlier generation is damaged, names another manifest, or is lost. A
    manifest may follow an end that names none: a slow attempt commits to a generation that was ended meanwhile.
    """
    for generation in itertools.count(1):
        end = Invalidated.url(slot, generation)
        ended = Invalidated.read(slot, generation)
        if ended is None:
            urls = [_url(slot, kind, generation + 1) for kind in _KINDS]
            later = [url for url, size in zip(urls, store.sizes(urls), strict=True) if size is not None]
            if not later:
                return generation
            # Read again: another process may have ended it and begun the next between the two looks.
            if (ended := Invalidated.read(slot, generation)) is None:
                raise ArtifactError(
                    f"{end} is missing, but there is {later[0]}, which comes after it; restore it from a copy, or "
                    f"remove {slot} to have its artifact made from nothing"
                )
        url = _url(slot, "manifest", generation)
        data = None if ended.manifest is None else store.read_if_exists(url)
        if data is not None and sha256(data) != ended.manifest:
            raise ArtifactError(f"{url} is not the manifest that {end} ended; restore it from a copy, or remove it")
    raise AssertionError


def is_committed(slot: str, generation: int) -> bool:
    """Return whether a generation has a manifest, readable or not."""
    return store.size(_url(slot, "manifest", generation)) is not None


def has_begun(slot: str, generation: int = 1) -> bool:
    """Return whether a generation has a layout, a manifest or an end."""
    return any(store.size(_url(slot, kind, generation)) is not None for kind in _KINDS)


def invalidate(slot: str, generation: int, reason: str) -> int:
    """End a generation, naming its manifest if it has one, and return the next generation. Deletes nothing.

    The caller names the generation that it judged: another process may have ended it and made the next one meanwhile.
    """
    manifest = store.read_if_exists(_url(slot, "manifest", generation))
    end = Invalidated(
        place=place_of(slot), generation=generation, manifest=sha256(manifest) if manifest else None, reason=reason
    )
    # If another process was faster, it ended the same generation.
    store.put_if_absent(Invalidated.url(slot, generation), end.sealed())
    return generation + 1


def _url(slot: str, kind: str, generation: int) -> str:
    return store.join(slot, f"{kind}.{generation}.json")
