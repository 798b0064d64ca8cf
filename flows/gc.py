"""Free what a run no longer needs."""

from dataclasses import asdict, dataclass
from typing import Any

from cosmos_rl_core import store
from flows.steps import open_run, steps
from stages.garbage import garbage


@dataclass(frozen=True)
class OfStage:
    """The garbage of one stage."""

    name: str
    files: int
    bytes: int


@dataclass(frozen=True)
class Garbage:
    """Files of a run that no artifact holds."""

    run_id: str
    url: str
    deleted: bool
    stages: list[OfStage]

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(stage.bytes for stage in self.stages)

    def lines(self) -> list[str]:
        """For people."""
        if not self.stages:
            return [f"nothing to delete in {self.url}"]
        lines = [f"{stage.name:<28} {stage.files:>6} files {stage.bytes / 1e6:>12.1f} MB" for stage in self.stages]
        return [*lines, f"{'freed' if self.deleted else 'would free'} {self.total / 1e6:.1f} MB"]

    def as_json(self) -> dict[str, Any]:
        """For scripts: ``run``, ``url``, ``deleted`` (false after ``--dry-run``), ``bytes`` of all, and ``stages``, of
        each ``name``, ``files`` (their number) and ``bytes``; those without garbage are left out."""
        stages = [asdict(stage) for stage in self.stages]
        return {"run": self.run_id, "url": self.url, "deleted": self.deleted, "bytes": self.total, "stages": stages}


def gc(store_url: str, run_id: str, *, superseded: bool, dry_run: bool) -> Garbage:
    """Delete files of the run that no artifact holds, or only find them.

    Datasets are shared by runs and left alone. Raises :class:`LeaseError` while a process works on the run.
    """
    run = open_run(store_url, run_id)
    stages = []
    with run.lease():
        for step in steps(run):
            if not step.slot.startswith(run.url) or not (found := garbage(step.slot, superseded=superseded)):
                continue
            stages.append(OfStage(step.name, len(found), sum(found.values())))
            for name in () if dry_run else found:
                store.remove(store.join(step.slot, name))
    return Garbage(run_id, run.url, not dry_run, stages)
