"""Files of a slot that no artifact holds any more: what killed attempts and lost races left."""

from collections.abc import Iterator

from cosmos_rl_core import store
from cosmos_rl_core.sealed import unseal
from stages.artifacts import read_manifest
from stages.generations import current_generation, is_committed
from stages.records import Marker


def garbage(slot: str, *, superseded: bool) -> dict[str, int]:
    """Sizes in bytes of the slot's files that can go, by their path in it. The only place that trusts a listing.

    What a retry would adopt stays: the finished shards of a generation that is not committed. With ``superseded`` the
    files of ended generations go too, and their manifests stay. Nobody may write to the slot meanwhile.
    """
    found = store.files(slot)
    standing = current_generation(slot)
    kept = {
        path
        for name in found
        if (generation := _generation(name)) is not None and not (superseded and generation < standing)
        for path in _files_of(slot, generation)
    }
    if not is_committed(slot, standing):
        kept |= {path for name in found if name.startswith("shards/") for path in _marked(slot, store.join(slot, name))}
    return {name: size for name, size in found.items() if name.startswith("attempts/") and name not in kept}


def _generation(name: str) -> int | None:
    """Of ``manifest.<n>.json``."""
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
