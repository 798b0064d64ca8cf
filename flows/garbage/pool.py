"""Delete files of text embeddings, and pictures that prompts refer to, if no artifact names them."""

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.store import Listed
from flows.garbage.roots import slots_in
from stages.artifacts.pool import ENDING, PICTURES, POOL, Named, is_announced, named_in, sweeping

AT_ONCE = 16
"""Number of files that are deleted in parallel. Meanwhile no embedding begins."""


class Pool:
    """The pool next to the slots of datasets. It knows which of its files these slots name."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._named = cache(named_in)

    def unnamed(self, listing: Mapping[str, Listed], slots: Mapping[str, Iterable[str]]) -> set[str]:
        """Return the paths of the files that no slot in ``slots`` names; ``slots`` maps names of slots to their files.

        Raises :class:`ArtifactError` if the record of a slot cannot be read.
        """
        known = [self._named(store.join(self._root, slot), frozenset(files)) for slot, files in slots.items()]
        every = Named(*(frozenset().union(*sets) for sets in zip(*known, strict=True))) if known else Named()
        return {path for path in files_of(listing) if not every.has(path)}

    def sweep(self, paths: Collection[str], listing: Mapping[str, Listed]) -> dict[str, int]:
        """Delete files in ``paths`` that no slot names now, and finish a sweep that was killed. Return their sizes.

        Files that were written again since ``listing`` stay, because their writer names them later.
        """
        if not paths and not is_announced(listing):
            return {}
        with sweeping(self._root):
            before, listing = listing, store.listed(self._root)
            gone = self.unnamed(listing, slots_in(listing)) & {*paths}
            gone = {path for path in gone if listing[path].written_s == before[path].written_s}
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(store.remove, [store.join(self._root, path) for path in sorted(gone)]))
        return {path: listing[path].size for path in gone}


def files_of(listing: Mapping[str, Listed]) -> set[str]:
    """Return the files of the pool in a listing of ``dataset/``."""
    texts = (path for path in listing if path.startswith(f"{POOL}/") and path.endswith(ENDING))
    # A dataset may have the name of this folder: then its snapshots are in folders next to the pictures.
    pictures = (path for path in listing if path.startswith(f"{PICTURES}/") and path.count("/") == 1)
    found = chain(texts, pictures)
    return {path for path in found if not store.is_temporary(path)}
