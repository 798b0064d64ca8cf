"""Snapshots of a dataset: which parts it has. Each is written once; the newest counts.

A run pins a snapshot and keeps to it. Nothing is deleted from a part, so that every snapshot stays whole. An old one
that no run pins may be removed as a whole: a record says so, its parts may go, and its own file stays, so that no
number is ever used twice.
"""

from typing import Any, Self

from pydantic import Field

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError, ConfigError, advised
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, unseal
from stages.artifacts.records import Sealed, parsed
from stages.artifacts.request import Input


class Snapshot(Sealed):
    """The parts of a dataset at one time."""

    kind = "snapshot"
    dataset: str
    """Name of the dataset in its store."""
    number: int = Field(ge=1)
    sources: dict[str, dict[str, Any]] = {}
    """Options of the sources when it was made, paths of folders among them: where people may find its media."""
    stamps: str
    """Digest of the stamps of the sources: equal stamps mean that nothing is new."""
    settings: str
    """Digest of the settings that its parts were made with. Under other settings all files are read again."""
    parts: tuple[Input, ...]
    """Artifacts of the stage ``index``, in order."""
    captioner: str | None = None
    """Digest of the captioner that wrote the captions; None if the dataset has no captioner."""
    captions: tuple[Input, ...] = ()
    """Artifacts of the stage ``caption``, one of each part, in order; empty without a captioner."""
    previous: str | None
    """Digest of the bytes of the snapshot before it; None for the first."""

    @classmethod
    def read(cls, store_url: str, dataset: str, number: int, *, removed: bool = False) -> Self | None:
        """Return a snapshot; None if there is none of that number. With ``removed``, also one that was removed.

        Raises :class:`ArtifactError` if it is damaged, or was written as another one, and :class:`ConfigError` if it
        was removed and ``removed`` is not set.
        """
        url = url_of(store_url, dataset, number)
        if not removed and is_removed(store_url, dataset, number):
            raise ConfigError(
                f"snapshot {number} of the dataset {dataset!r} was removed as nothing needed it; use a newer one: "
                "another number or none in the settings, and another --run-id for a run; "
                f"`{advised('data show', dataset, store=store.absolute(store_url))}` shows the newest"
            )
        data = store.read_if_exists(url)
        if data is None:
            return None
        found = parsed(cls, unseal(data, cls.kind, url), url)
        if (found.dataset, found.number) != (dataset, number):
            raise ArtifactError(f"{url} was written as snapshot {found.number} of {found.dataset!r}; {RESTORE}")
        return found

    @property
    def digest(self) -> str:
        """Return the digest of its bytes."""
        return sha256(self.sealed())


class Removed(Sealed):
    """A record that a snapshot was removed: its parts may be gone."""

    kind = "removed"
    dataset: str
    number: int = Field(ge=1)


def is_removed(store_url: str, dataset: str, number: int) -> bool:
    """Return whether a snapshot was removed, also if the record cannot be read."""
    return store.size(_removal(store_url, dataset, number)) is not None


def remove(store_url: str, dataset: str, number: int) -> None:
    """Record that a snapshot is removed, before anything of it is deleted."""
    record = Removed(dataset=dataset, number=number)
    store.put_if_absent(_removal(store_url, dataset, number), record.sealed())


def take_back(store_url: str, dataset: str, number: int) -> None:
    """Delete the record of a removal. Only for the holder of the lease of removals, before anything is deleted."""
    store.remove(_removal(store_url, dataset, number))


def root_of(store_url: str, dataset: str) -> str:
    """Return the folder of a dataset in its store."""
    return store.join(store.absolute(store_url), "dataset", dataset)


def url_of(store_url: str, dataset: str, number: int) -> str:
    """Return where a dataset keeps a snapshot."""
    return store.join(root_of(store_url, dataset), "snapshots", f"{number}.json")


def _removal(store_url: str, dataset: str, number: int) -> str:
    return store.join(root_of(store_url, dataset), "snapshots", f"removed.{number}.json")


def names(store_url: str) -> list[str]:
    """Return the datasets of a store that have a snapshot."""
    root = store.join(store.absolute(store_url), "dataset")
    # Other folders there are artifacts, named by digests.
    return [name for name in store.names(root) if len(name) < 64 and _exists(store_url, name, 1)]


def newest(store_url: str, dataset: str) -> Snapshot | None:
    """Return the newest snapshot of a dataset; None if it has no snapshot. Found by probing, never by listing."""
    number = 1
    while _exists(store_url, dataset, number):
        number *= 2
    low, high = number // 2, number  # the newest is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _exists(store_url, dataset, middle) else (low, middle)
    return Snapshot.read(store_url, dataset, low) if low else None


def put(store_url: str, snapshot: Snapshot) -> bool:
    """Write a snapshot. Return False if another process has written that number meanwhile."""
    return store.put_if_absent(url_of(store_url, snapshot.dataset, snapshot.number), snapshot.sealed())


def _exists(store_url: str, dataset: str, number: int) -> bool:
    return store.size(url_of(store_url, dataset, number)) is not None
