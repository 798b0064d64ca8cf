"""Write the page of a run to its stable address, ``runs/RUN/report/index.html``, replaced whole."""

import time
from calendar import timegm
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any, Self

import humanize

from cosmos_rl_core.errors import ApprovalError, BudgetError, CosmosRLError, StoppedError, first_line
from cosmos_rl_core.storage import store
from flows.ledger.costs import duration
from flows.ledger.pages import HOUR_S, newest_page
from flows.planning.plan import PLAN_FILE
from flows.planning.run import Run
from flows.reporting import facts
from flows.reporting.collecting import Collected
from flows.terminal import commands
from flows.watching.metrics import FILE as NUMBERS
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.contracts import Report
from stages.reporting.book import Book, Now
from stages.reporting.page import report_page

SHARE = 20
"""A page is written after an iteration only if this many times as long has passed as the last page took."""
ENDINGS = {
    "running": "Running",
    "finished": "Finished",
    "failed": "Failed",
    "stopped": "Stopped by somebody; the same command continues it",
    "suspended": "Suspended by a warning until `cosmos-flows approve`",
    "limited": "Reached train.max_gpu_hours; the same command with a higher limit continues it",
    "interrupted": "Its process was killed; the same command continues it",
    "idle": "No process works on it",
}
"""How a run is, in words."""
Note = Callable[[str], None]


def address(run: Run) -> str:
    """Return where the page of a run is."""
    return store.join(run.slots.report, Report.PAGE)


def page(collected: Collected, state: str, error: str = "") -> bytes:
    """Return the page of what was collected."""
    run = collected.run
    book = Book(
        title=run.plan.run_id,
        reward=run.headline_reward,
        init=run.plan.lineage,
        about=facts.about(run.plan),
        settings=facts.settings(run.plan, identity=False),
        roles=facts.roles(run.plan),
        # Recipes of VLMs have none.
        staleness=getattr(run.recipe.train, "staleness", 0),
        iterations=[piece for _, piece in sorted(collected.iterations.items())],
        judged=[piece for _, piece in sorted(collected.judged.items())],
        trained=[one for _, one in sorted(collected.trained.items())],
        now=_now(collected, state, error),
    )
    return report_page(book)


def _now(collected: Collected, state: str, error: str) -> Now:
    run, total = collected.run, collected.run.recipe.train.num_iterations
    trained = len(collected.trained)
    names, rows = _costs(collected)
    return Now(
        state=state,
        words=f"{ENDINGS[state]}: {trained} of {total} iterations are trained.",
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        error=error,
        command=commands.to_go_on(run, collected.decided),
        versions=list(_versions(collected)),
        dates=[*_dates(collected), *_ledger(run, trained)],
        troubles=collected.troubles,
        decisions=list(collected.decisions()),
        costs=rows,
        cost_names=names,
        links=list(_links(run)),
    )


def _costs(collected: Collected) -> tuple[Sequence[str], Sequence[tuple[str, ...]]]:
    """Return seconds by stage, and of all of them."""
    total = sum(stage.seconds for stage in collected.stages.values())
    rows = [
        (name, str(one.made), f"{one.seconds:,.1f}", f"{one.seconds / one.made:.1f}" if one.made else "–",
         f"{one.seconds / total:.0%}" if total else "–", str(one.failed))
        for name, one in collected.stages.items()
    ]  # fmt: skip
    made, failed = (sum(getattr(one, name) for one in collected.stages.values()) for name in ("made", "failed"))
    rows.append(("all", str(made), f"{total:,.1f}", "", "", str(failed)))
    return ["stage", "artifacts", "seconds", "seconds each", "share", "failed attempts"], rows


def _versions(collected: Collected) -> Iterator[tuple[str, str]]:
    yield "cosmos-rl-flows", version("cosmos-rl-flows")
    found = collected.numerics
    for name in ("python", "device", "cpu", "cuda", "world_size", "threads", "compute_dtype", "deterministic"):
        if name in found:
            yield name.replace("_", " "), str(found[name])
    yield from found.get("packages", {}).items()
    stages = collected.run.plan.stage_versions
    yield "stages", ", ".join(f"{name} {number}" for name, number in sorted(stages.items()))


def _dates(collected: Collected) -> Iterator[tuple[str, str]]:
    if not all(collected.logs):
        return
    first, newest = (timegm(time.strptime(log.partition("-")[0], "%Y%m%dT%H%M%S")) for log in collected.logs)
    for name, ended_s in (("first attempt ended", first), ("newest attempt ended", newest)):
        yield name, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ended_s))
    yield "between them", str(timedelta(seconds=newest - first))


def _ledger(run: Run, trained: int) -> Iterator[tuple[str, str]]:
    """Yield the sums of the ledger, which counts attempts that left nothing too."""
    if (newest := newest_page(run.url)) is None:
        return
    totals = newest.totals
    yield "all waves, with their queues", duration(totals.wall_s)
    yield "device hours", f"{totals.device_s / HOUR_S:.3g}"
    if trained:
        yield "device hours an iteration", f"{totals.iterations_device_s / HOUR_S / trained:.3g}"
    yield "attempts", f"{totals.attempts}, of which {totals.failed} left no artifact"
    sizes = (humanize.naturalsize(size) for size in (totals.read_bytes, totals.written_bytes))
    yield "store", "read {}, written {}".format(*sizes)
    yield "more", commands.about(run.store_url, "cost", run.plan.run_id)


def _links(run: Run) -> Iterator[tuple[str, str]]:
    for name, words in ((PLAN_FILE, "the frozen plan, with the whole recipe"), (NUMBERS, "all numbers")):
        if store.size(store.join(run.url, name)) is not None:
            yield f"{name}: {words}", f"../{name}"


class Pages:
    """Follows a run: :meth:`done` is called after each wave. Failures to write a page end no run."""

    def __init__(self, run: Run, note: Note) -> None:
        self.collected = Collected(run)
        """What the page is made from."""
        self._note = note
        self._written_s, self._took_s = -float("inf"), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._try(lambda: self._end(error))

    def done(self, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
        """Add the artifacts of a wave. Write the page when an iteration has ended or a policy was judged."""
        pairs = list(zip(requests, manifests, strict=True))
        self._try(lambda: self._add(pairs))

    def _add(self, pairs: Sequence[tuple[Request, Manifest]]) -> None:
        for request, manifest in pairs:
            self.collected.add(request.slot, manifest)
        ends = any(request.stage in ("fragment", "finetune", "vlm_finetune") for request, _ in pairs)
        if ends and time.monotonic() - self._written_s >= SHARE * self._took_s:
            self._write("running")

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._write("finished")
            return
        state = "failed" if isinstance(error, Exception) else "stopped"
        state = "suspended" if isinstance(error, ApprovalError) else state
        state = "limited" if isinstance(error, BudgetError) else state
        state = "stopped" if isinstance(error, StoppedError) else state
        self.collected.fill()
        self._write(state, str(error) if isinstance(error, CosmosRLError) else first_line(error))

    def _write(self, state: str, error: str = "") -> None:
        began_s = time.monotonic()
        store.write(address(self.collected.run), page(self.collected, state, error))
        self._written_s = time.monotonic()
        self._took_s = self._written_s - began_s

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # whatever a page comes to, the run goes on
            why = f"{type(error).__name__}: {first_line(error)}"
            self._note(f"warning: the page of the report was not written ({why}); `cosmos-flows report` writes it anew")
