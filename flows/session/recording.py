"""Numbers and heads of a run, after one of its stages was made alone."""

from collections.abc import Callable
from contextlib import suppress

from flows.planning.base import AnyRun
from flows.session.loop import make
from flows.watching.tracking import Tracker
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of


class _NotYetError(Exception):
    """Raised at the first wave that lacks an artifact."""


def record(run: AnyRun, note: Callable[[str], None]) -> None:
    """Write ``metrics.jsonl`` and the heads of all that was made, in the order of the waves, as the whole run does.

    It ends at the first wave that lacks an artifact. Raises :class:`ArtifactError` if a table or a head is damaged.
    """

    def look(_: str, *requests: Request) -> list[Manifest]:
        found = [current_of(request.slot)[1] for request in requests]
        manifests = [manifest for manifest in found if manifest is not None]
        if len(manifests) < len(requests):
            raise _NotYetError
        tracker.done(requests, manifests)
        return manifests

    with suppress(_NotYetError), Tracker(run, note) as tracker:
        make(run, look)
