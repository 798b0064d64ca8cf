"""Re-scores of a run: their records, and the Requests that their artifacts are compared with."""

from collections.abc import Iterator
from contextlib import suppress

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from flows.auditing.checks.faults import Findings
from flows.planning.base import AnyRun
from flows.planning.run import Run
from flows.planning.steps import Step
from flows.rescoring.record import FILE, RESCORE, folders, read
from flows.rescoring.rescore import Rescore
from stages.artifacts.request import Request


def rescores_of(run: AnyRun, findings: Findings) -> Iterator[Rescore]:
    """Yield the re-scores of a run. A record that is damaged, or missing where there are artifacts, is a fault."""
    for folder in folders(run.url):
        url = store.join(run.url, RESCORE, folder)
        if not isinstance(run, Run) or not _has_begun(url):
            continue  # its files are listed with what nothing names
        with findings.catching(store.join(url, FILE), "record"):
            yield Rescore(run, read(run.url, folder))


def _has_begun(url: str) -> bool:
    return not {FILE, "iterations", "exports"}.isdisjoint(store.names(url))


class AskedAgain:
    """The Requests of a re-score."""

    def __init__(self, rescore: Rescore) -> None:
        self._rescore = rescore

    def versions(self, stage: str) -> set[int]:
        """Return the version of a stage that the record names, in a set; an empty set if it names none."""
        found = self._rescore.record.versions.get(stage)
        return set() if found is None else {found}

    def of(self, step: Step) -> Iterator[tuple[Request, str]]:
        """Yield the Request for the slot of a step, unless an input is missing."""
        with suppress(ArtifactError):
            yield step.request(), ""
