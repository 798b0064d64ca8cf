"""Everything a stage receives besides its Request."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from cosmos_rl_core.canonical import require_exchangeable
from cosmos_rl_core.errors import ArtifactError
from stages.artifacts.attempt import Attempt
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome


class Ranks(Protocol):
    """The processes that make an artifact together. Values are sent between them as JSON."""

    @property
    def rank(self) -> int:
        """Return the number of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        ...

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank. Collective."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""


class Alone:
    """The ranks of a stage that is one process without torch. It exchanges no tensors."""

    rank = 0
    world_size = 1

    def broadcast(self, value: Any) -> Any:
        """Return the value. Raises ``TypeError`` for a value that another rank would not get unchanged."""
        require_exchangeable(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return a list of the value. Raises ``TypeError`` for a value that another rank would not get unchanged."""
        require_exchangeable(value)
        return [value]

    def close(self) -> None:
        """Do nothing: there is no process group."""


class Handed(Protocol):
    """The source of a worker's units (:class:`stages.execution.handing.HandedUnits`)."""

    def hands(self, count: int, at_once: int) -> Iterator[list[int]]:
        """Yield numbers of units for all ranks of this worker, until all are made. Collective."""
        ...

    def made(self, number: int) -> None:
        """Tell the source that a unit is in the store."""


Joined = TypeVar("Joined", bound=Ranks, covariant=True)
Told = TypeVar("Told")


def told_by_all(ranks: Ranks, make: Callable[[], Told]) -> list[Told]:
    """Return the values that ``make`` returns on the ranks, in rank order. Collective.

    An :class:`ArtifactError` of one rank is raised on all: otherwise the others would wait for it.
    """
    made, why = None, ""
    try:
        made = make()
    except ArtifactError as error:
        why = str(error)
    found = ranks.gather([made, why])
    if whys := [one for _, one in found if one]:
        raise ArtifactError(whys[0])
    return [one for one, _ in found]


@dataclass(frozen=True)
class Context(Generic[Joined]):
    """The attempt that a stage writes, the ranks that make it, and the outcome that it reports to.

    A stage that computes with torch takes a ``Context[Group]``, whose ranks exchange tensors
    (:class:`cosmos_rl_core.parallel.distributed.Group`); any other stage takes a ``Context[Ranks]``.
    """

    attempt: Attempt
    ranks: Joined
    outcome: Outcome
    halvings: int = 0
    """How often earlier attempts ran out of memory."""
    execution: Execution = field(default_factory=Execution)
    """How the stage runs."""
    handed: Handed | None = None
    """Where units come from if the stage is elastic; None if its ranks share all of them."""

    def shrunk(self, size: int) -> int:
        """Halve a number of samples that are in memory at once, once for each earlier attempt that ran out of it.

        At least 1.
        """
        return max(1, size >> self.halvings)

    def progress(self, phase: str, step: int, total: int) -> None:
        """Report ``step`` of ``total``. It also is the sign of life that stall detection waits for."""
        self.outcome.progress(phase, step, total)

    def hands(self, count: int, *, at_once: int = 1) -> Iterator[list[int]]:
        """Yield numbers of ``count`` units that these ranks make together. Collective.

        Ranks that share all units get them all at once. A worker of an elastic stage gets ``at_once`` units for each
        rank at a time. Once all are made, one worker goes on, and needs the files of all units: it reads the markers of
        units that were offered to other attempts, and makes the units without a marker itself.
        """
        if self.handed is None:
            yield list(range(count))
            return
        yield from self.handed.hands(count, at_once)
        missing = [n for n in self.own(count) if not self.attempt.take_over(n)]
        if rest := sorted(chain.from_iterable(self.ranks.gather(missing))):
            yield rest

    def units(self, count: int) -> Iterator[int]:
        """Yield numbers of ``count`` units that this rank makes, one at a time; see :meth:`hands`."""
        for together in self.hands(count):
            yield from together[self.ranks.rank :: self.ranks.world_size]

    def own(self, count: int) -> range:
        """Return numbers of ``count`` units whose results this rank reports, once all are made."""
        return range(self.ranks.rank, count, self.ranks.world_size)

    def layout(self, layout: dict[str, Any], **made_by: str) -> dict[str, Any]:
        """Commit how the work is divided, or return the layout that an earlier attempt committed. Collective.

        Finished shards are adopted only of attempts with the same ``made_by``.
        """
        committed = (
            [self.attempt.layout(layout, self.outcome.note, self.halvings), self.attempt.generation]
            if self.ranks.rank == 0
            else None
        )
        layout, generation = self.ranks.broadcast(committed)
        self.attempt.use_layout(layout, generation, **made_by)
        return layout
