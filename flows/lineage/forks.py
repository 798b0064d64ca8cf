"""Forks of a run: records in the run's own folder, so that its files stay as long as forks refer to them."""

from collections.abc import Iterator, Sequence

from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import unseal
from stages.artifacts.records import Sealed, parsed, place_of

FORKS = "forks"
"""Name of the folder of a run that has a record for each fork."""
EVERY = "*"
"""Value in place of slots: everything in the run. It holds while a fork is made and its references are not known."""


class Fork(Sealed):
    """A record that a fork refers to artifacts of this run. It is written before the references."""

    kind = "fork"
    run: str
    """Id of the fork."""
    at: int
    """The policy version that the fork began with."""
    references: dict[str, tuple[int, ...]]
    """Generations to which the fork refers, by the place of their slots. `gc` deletes none of their files."""
    holds: tuple[str, ...]
    """Places of the slots of which the fork's own stages read all parts. Retention deletes none of these parts."""

    @property
    def name(self) -> str:
        """Return the file name of the record."""
        return f"{self.run}.json"


def forks_of(run_url: str) -> Iterator[Fork]:
    """Yield the forks of a run, sorted by their ids. Raises :class:`ArtifactError` if a record is damaged."""
    folder = store.join(run_url, FORKS)
    for name in sorted(store.names(folder)):
        if name.endswith(".json") and (data := store.read_if_exists(url := store.join(folder, name))) is not None:
            yield parsed(Fork, unseal(data, Fork.kind, url), url)


def note(run_url: str, fork: Fork) -> None:
    """Write the record of a fork into the folder of the run to whose artifacts it refers."""
    store.write(store.join(run_url, FORKS, fork.name), fork.sealed())


def forget(run_url: str, fork: str) -> None:
    """Delete the record of a fork, which is deleted itself."""
    if store.size(url := store.join(run_url, FORKS, f"{fork}.json")) is not None:
        store.remove(url)


def is_held(run_url: str, slot: str) -> bool:
    """Return whether a fork reads all parts of a slot of the run."""
    return any({EVERY, place_of(slot)} & {*fork.holds} for fork in forks_of(run_url))


def refers(forks: Sequence[Fork], slot: str, generation: int) -> bool:
    """Return whether one of the forks refers to a generation of a slot."""
    place = place_of(slot)
    return any(EVERY in fork.holds or generation in fork.references.get(place, ()) for fork in forks)
