"""Observers of a run at work: functions that are called before and after each wave."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request

Launch = Callable[..., list[Manifest]]
"""Function that makes a wave from its name and its Requests."""


def _let_pass(name: str, requests: Sequence[Request]) -> None:
    """Do nothing."""


def _ignore(name: str, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Functions that are called around each wave."""

    before: Callable[[str, Sequence[Request]], None] = _let_pass
    """Called with the wave's name and Requests. Raises to keep it from starting."""
    after: Callable[[str, Sequence[Request], Sequence[Manifest]], None] = _ignore
    """Called with the manifests too, once all are there. Raises to stop the run after the wave."""
    passed: Callable[[str, Sequence[Request], Sequence[Manifest]], None] | None = None
    """Called instead of ``after``, if it is given, for a wave that was already current."""
    taken: Callable[[], None] | None = None
    """Called once after several waves that were already current, before the next one is made."""


def observed(launch: Launch, observers: Sequence[Observer]) -> Launch:
    """Return ``launch`` with observers around it, called in their order."""

    def launch_observed(name: str, *requests: Request) -> list[Manifest]:
        for one in observers:
            one.before(name, requests)
        manifests = launch(name, *requests)
        for one in observers:
            one.after(name, requests, manifests)
        return manifests

    return launch_observed


def told(observers: Sequence[Observer], name: str, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
    """Tell observers, in their order, of a wave that is current. Raises what they raise."""
    for one in observers:
        (one.passed or one.after)(name, requests, manifests)
