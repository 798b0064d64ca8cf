"""The scorers of reward services that a run keeps to: records next to its plan, written at first contact."""

import itertools
from collections.abc import Callable

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.rewards._base import NamedReward
from cosmos_rl_core.rewards._base.served import ScorerChangedError, ServedScorer
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.sealed import RESTORE, seal, unseal
from stages.artifacts.records import parsed

KIND = "scorer"


class Named(Section):
    """A scorer as its service named it."""

    name: str
    version: str
    digest: str


class Pinned(Section):
    """A record of the scorer that a reward keeps to from now on: found at first contact, or accepted later."""

    reward: str
    number: int
    scorer: Named | None
    """The scorer; None for a service that names none."""


def settle(
    reward: NamedReward, label: str, record: str | None, *, accept: bool, note: Callable[[str], None]
) -> ServedScorer | None:
    """Ask the service which scorer it has, pin it below the URL ``record`` if none is pinned there, and return it.

    If another scorer is pinned, pin the new one if ``accept``, and raise :class:`ScorerChangedError` otherwise. Without
    ``record`` nothing is pinned.
    """
    found = reward.scorer()
    if record is None:
        return found
    while True:
        every = pinned_scorers(record, label)
        number, pinned = len(every), every[-1] if every else None
        if pinned is not None and _identity(_scorer(pinned)) == _identity(found):
            return found
        if pinned is not None and not accept:
            raise ScorerChangedError.of(label, _scorer(pinned), found)
        named = None if found is None else Named(name=found.name, version=found.version, digest=found.digest)
        ours = Pinned(reward=label, number=number + 1, scorer=named)
        # If two processes meet the service first, one writes the record, and the other then reads it.
        written = store.put_if_absent(_url(record, label, number + 1), seal(KIND, ours.model_dump(mode="json")))
        if written and pinned is not None:
            note(f"accepted another scorer of {label}: {_scorer(pinned)} -> {found}")


def pinned_scorers(record: str, label: str) -> list[Pinned]:
    """Return the records of a reward below the URL ``record``, in order. Raises :class:`ArtifactError` if damaged."""
    every = list[Pinned]()
    for number in itertools.count(1):
        url, following = _url(record, label, number), _url(record, label, number + 1)
        data = store.read_if_exists(url)
        if data is None:
            if store.size(following) is not None:
                raise ArtifactError(f"{url} is missing, but there is {following}; {RESTORE}")
            return every
        found = parsed(Pinned, unseal(data, KIND, url), url)
        if (found.reward, found.number) != (label, number):
            written = f"number {found.number} of {found.reward}"
            raise ArtifactError(f"{url} was written as {written}, expected number {number} of {label}; {RESTORE}")
        every.append(found)
    raise AssertionError("the numbers do not end")


def _scorer(pinned: Pinned) -> ServedScorer | None:
    return None if pinned.scorer is None else ServedScorer(**pinned.scorer.model_dump())


def _identity(scorer: ServedScorer | None) -> str:
    return "" if scorer is None else scorer.digest


def _url(record: str, label: str, number: int) -> str:
    return store.join(record, f"{label}.{number}.json")
