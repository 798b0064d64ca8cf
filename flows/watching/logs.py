"""The logs of a run: one for each attempt of a stage that has ended, next to its artifact."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.ledger.attempts import LOGS, logs_of
from flows.library.opened_run import open_run
from flows.planning.steps import Step, find
from flows.terminal.commands import about


@dataclass(frozen=True)
class Log:
    """The log of one attempt."""

    name: str
    """The stage, as ``status`` names it: ``iteration-0003/update``."""
    attempt: int
    """Number of the attempt; 1 for the first one that left a log."""
    ended: str
    """When it was written, in UTC: ``2025-01-31 12:00:00``."""
    bytes: int
    url: str


@dataclass(frozen=True)
class Logs:
    """The logs of a run, in the order of its stages."""

    run: str
    store: str
    logs: list[Log]

    def as_json(self) -> list[dict[str, Any]]:
        """Return the logs for scripts."""
        return [asdict(log) for log in self.logs]

    def parts(self) -> Iterator[str | Table]:
        """Yield lines and a table to print."""
        if not self.logs:
            yield f"no attempt of a stage of {self.run} has ended yet: an attempt leaves its log when it ends"
            return
        table = Table("stage", "attempt", "ended, UTC", "bytes", box=None, pad_edge=False, header_style="bold")
        for log in self.logs:
            table.add_row(log.name, str(log.attempt), log.ended, str(log.bytes))
        yield table
        words = (self.run, "--stage", self.logs[-1].name.rpartition("/")[2])
        yield f"one of them: {about(self.store, 'logs', *words)} (with --iteration, --attempt)"


def logs(store_url: str, run_id: str, stage: str | None = None, iteration: int | None = None) -> Logs:
    """Return the logs of all stages of a run or of one stage; of all its iterations if ``iteration`` is None.

    Raises :class:`ConfigError` if there is no such run or stage.
    """
    every = open_run(run_id, store_url).steps
    if stage is not None:
        known = [step for step in every if step.stage == stage]
        every = known if iteration is None and known else [find(every, run_id, stage, iteration)]
    elif iteration is not None:
        every = [step for step in every if step.k == iteration]
        if not every:
            raise ConfigError(f"{run_id} has no iteration {iteration}")
    return Logs(run_id, store_url, [log for step in every for log in _of(step)])


def text_of(found: Logs, attempt: int | None) -> str:
    """Return the text of the newest log, or of an attempt's log, of the last stage that has one.

    Raises :class:`ConfigError` if there is none.
    """
    newest = found.logs[-1].name if found.logs else ""
    last = [log for log in found.logs if log.name == newest]
    chosen = last[-1:] if attempt is None else [log for log in last if log.attempt == attempt]
    if not chosen:
        known = f"{newest} has attempts 1 to {len(last)}" if last else "an attempt leaves its log when it ends"
        raise ConfigError(f"{found.run} has no such log; {known}")
    # A carriage return ends a line too, because progress bars use it to draw over themselves.
    return store.read(chosen[0].url).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def _of(step: Step) -> Iterator[Log]:
    folder = store.join(step.slot, LOGS)
    names = logs_of(step.slot)
    sizes = store.sizes([store.join(folder, name) for name in names])
    for number, (name, size) in enumerate(zip(names, sizes, strict=True), 1):
        day, clock = name[:8], name[9:15]
        ended = f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}:{clock[4:]}"
        yield Log(step.name, number, ended, size or 0, store.join(folder, name))
