"""The current waves before the first one that is not: found by one look, and taken without a task for each."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.imports import uncollected
from flows.planning.steps import Wave
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest, current_of, one_look


@dataclass(frozen=True)
class CurrentWave:
    """A wave whose artifacts are all current."""

    wave: Wave
    requests: tuple[Request, ...]
    manifests: tuple[Manifest, ...]

    @property
    def told(self) -> list[tuple[str, Manifest]]:
        """Return its slots, each with its artifact."""
        return [(request.slot, manifest) for request, manifest in zip(self.requests, self.manifests, strict=True)]


Ended = Callable[[Wave, Sequence[Manifest]], None]
"""Function that is told of a wave whose artifacts are there."""
Take = Callable[[Sequence[CurrentWave], Ended], None]
"""Function that takes a run through waves that are made already, and tells of each."""


def left(waves: Sequence[Wave], take: Take, ended: Ended) -> Iterator[Wave]:
    """Yield the waves that have to be made. Waves between them whose artifacts are current are taken together.

    Each look ends before a wave is yielded, because making it changes what is current.
    """
    place = 0
    while place < len(waves):
        with one_look():
            if current := leading(waves[place:]):
                take(current, ended)
        place += len(current)
        yield from waves[place : place + 1]
        place += 1


def leading(waves: Iterable[Wave]) -> list[CurrentWave]:
    """Return the waves whose artifacts are all current, up to the first with a missing or outdated artifact.

    A damaged artifact ends them too: its wave raises the error in its turn. Call it inside of ``one_look``.
    """
    found: list[CurrentWave] = []
    with uncollected():
        for wave in waves:
            try:
                one = _current(wave)
            except ArtifactError:
                break
            if one is None:
                break
            found.append(one)
    return found


def names_of(current: Sequence[CurrentWave]) -> str:
    """Return the names of the first and the last of some waves, such as ``policy to report``."""
    return " to ".join(dict.fromkeys([current[0].wave.name, current[-1].wave.name]))


def _current(wave: Wave) -> CurrentWave | None:
    # First, because to make a Request the manifests of its inputs are read.
    if any(current_of(step.slot)[1] is None for step in wave.steps):
        return None
    requests = [step.request() for step in wave.steps]
    manifests = [manifest for request in requests if (manifest := current_manifest(request)) is not None]
    return CurrentWave(wave, tuple(requests), tuple(manifests)) if len(manifests) == len(requests) else None
