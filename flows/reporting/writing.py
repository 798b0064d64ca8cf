"""The page of a run at its stable address, ``runs/RUN/report/index.html``, where each writing replaces it whole."""

import time
from calendar import timegm
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import Any, Self

import humanize

from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ApprovalError, ArtifactError, BudgetError, StoppedError, counted, first_line
from cosmos_rl_core.storage import store
from flows.comparing.weights import moved
from flows.ledger.attempts import Attempts, Left, named
from flows.ledger.causes import ending
from flows.ledger.costs import Startup, crews_of, device_time, duration, on_devices, price_of
from flows.library.collected import Collected, Stage
from flows.library.outlook import known_means, waves_left_s
from flows.library.states import states
from flows.planning import facts
from flows.planning.base import AnyRun
from flows.planning.plan import METRICS_FILE, PLAN_FILE
from flows.planning.ranking import ranked_by
from flows.post_train import post_train
from flows.terminal import commands
from stages import registry
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import place_of
from stages.artifacts.request import Request
from stages.execution.spending import Crew
from stages.reporting.book import Book, Now
from stages.reporting.contracts import Report
from stages.reporting.page import report_page

MOST_BYTES = 2**28
"""Most bytes of a policy's weights that a page reads: enough for LoRA, not for whole models."""
SHARE = 20
"""A page is written after an iteration only if this many times as long has passed as the last page took."""
Note = Callable[[str], None]


def address(run: AnyRun) -> str:
    """Return the URL of a run's page."""
    return store.join(run.slots.report, Report.PAGE)


def page(collected: Collected, state: str, error: str = "", wave: str = "") -> bytes:
    """Return the HTML page of collected facts. ``wave`` is the one that a process works on now; "" without any."""
    run = collected.run
    book = Book(
        title=run.plan.run_id,
        reward=run.headline_reward,
        ranked_by=ranked_by(run),
        init=run.plan.lineage,
        about=facts.about(run.plan),
        settings=facts.settings(run.plan, identity=False),
        roles=facts.roles(run.plan),
        # Recipes of other kinds have none.
        staleness=run.staleness,
        iterations=[piece for _, piece in sorted(collected.iterations.items())],
        judged=[piece for _, piece in sorted(collected.judged.items())],
        trained=[one for _, one in sorted(collected.trained.items())],
        now=_now(collected, state, error, wave),
        references=collected.references,
    )
    return report_page(book)


def _now(collected: Collected, state: str, error: str, wave: str) -> Now:
    run, total = collected.run, collected.run.recipe.train.num_iterations
    trained = run.plan.first + sum(k >= run.plan.first for k in collected.trained)
    damage = _look(collected.attempts)
    left = list(collected.attempts.left(collected.logged, wave))
    names, rows = _costs(collected, left, {} if damage else collected.attempts.startups())
    state, words, error = ending(state, error)
    ledger = [("ledger", damage)] if damage else _ledger(collected, left, wave)
    return Now(
        state=state,
        words=f"{words}: {trained} of {total} iterations are trained.",
        written=time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        left="" if damage or state == "finished" else _time_left(collected),
        weights=list(_weights(collected)),
        error=error,
        command=commands.to_go_on(run, collected.decided),
        versions=list(_versions(collected)),
        dates=[*_dates(collected), *ledger],
        troubles=[
            *((one.name, str(one.count), one.why) for one in left),
            *((name, "–", why) for name, why in collected.made_again),
            *((name, "–", f"damaged: {why}") for name, why in collected.damaged.items()),
        ],
        all_left_artifacts=not left,
        decisions=list(collected.decisions()),
        costs=rows,
        cost_names=names,
        links=list(_links(run)),
    )


def _look(attempts: Attempts) -> str:
    """Read the ledger again, and return its damage in one line, or ""."""
    try:
        attempts.look()
    except ArtifactError as error:
        return first_line(error)
    return ""


def _time_left(collected: Collected) -> str:
    """Return how long the work that is left will take, evaluations too; "" if that is unknown."""
    run = collected.run
    waves = (wave for wave in post_train(run) if not collected.has(step.slot for step in wave.steps))
    left_s = waves_left_s([wave.name for wave in waves], partial(known_means, run))
    return "" if left_s is None else duration(left_s)


def _weights(collected: Collected) -> Iterator[tuple[str, str]]:
    """Yield the best policy version, how far it moved from version 0, and the command that exports it."""
    if (best := collected.best) is None:
        return
    run = collected.run
    yield "best policy", str(best)
    with collected.naming_damage("policies that are compared"):
        if (far := moved(run, best.k, MOST_BYTES)) is not None:
            yield "its weights", str(far)
    if best.k in collected.exported:
        yield "export it", commands.about(run.store_url, "export", run.plan.run_id, "weights", "--policy", str(best.k))


def _costs(
    collected: Collected, left: Sequence[Left], startups: Mapping[str, Startup]
) -> tuple[Sequence[str], Sequence[tuple[str, ...]]]:
    """Return the names and the rows of the table of costs: seconds of artifacts and start-up, by stage and in all."""
    without = Counter[str]()
    for one in left:
        without[one.stage] += one.count
    stages = collected.stages | {name: Stage() for name in without if name not in collected.stages}
    total = sum(stage.seconds for stage in stages.values())
    rows = [
        (name, str(one.made), f"{one.seconds:,.1f}", f"{one.seconds / one.made:.1f}" if one.made else "–",
         f"{one.seconds / total:.0%}" if total else "–", _seconds(startups.get(name)), str(without[name]))
        for name, one in stages.items()
    ]  # fmt: skip
    made = sum(one.made for one in stages.values())
    every = sum((one.seconds for one in startups.values()), 0.0)
    rows.append(("all", str(made), f"{total:,.1f}", "", "", f"{every:,.1f}" if startups else "–", str(without.total())))
    names = ["stage", "artifacts", "seconds", "seconds each", "share", "start-up, seconds"]
    return [*names, "attempts without an artifact"], rows


def _seconds(startup: Startup | None) -> str:
    return f"{startup.seconds:,.1f}" if startup is not None and startup.known else "–"


def _versions(collected: Collected) -> Iterator[tuple[str, str]]:
    yield "cosmos-rl-flows", version("cosmos-rl-flows")
    found = next(reversed(collected.numerics.values()), {})
    for name in ("python", "device", "cpu", "cuda", "world_size", "threads", "compute_dtype", "deterministic"):
        if name in found:
            yield name.replace("_", " "), str(found[name])
    yield from found.get("packages", {}).items()
    yield from ((f"scorer of {label}", version) for label, version in collected.scorers.items())
    stages = collected.run.plan.stage_versions
    yield "stages", ", ".join(f"{name} {number}" for name, number in sorted(stages.items()))


def _dates(collected: Collected) -> Iterator[tuple[str, str]]:
    if not all(collected.logs):
        return
    first, newest = (timegm(time.strptime(log.partition("-")[0], "%Y%m%dT%H%M%S")) for log in collected.logs)
    for name, ended_s in (("first attempt ended", first), ("newest attempt ended", newest)):
        yield name, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ended_s))
    yield "between them", str(timedelta(seconds=newest - first))


def _ledger(collected: Collected, left: Sequence[Left], wave: str) -> Iterator[tuple[str, str]]:
    """Yield the sums of the ledger, which counts attempts that left nothing too."""
    run, attempts = collected.run, collected.attempts
    trained = sum(k >= run.plan.first for k in collected.trained)
    if attempts.newest is None:
        return
    totals = attempts.newest.totals
    yield "all waves, with their queues", duration(totals.wall_s)
    yield "device time", f"{device_time(totals.device_s)}, {on_devices(attempts.every)}"
    if trained:
        yield "device time an iteration", device_time(totals.iterations_device_s / trained)
    yield "attempts", f"{totals.attempts}, of which {_left(left, attempts.at_work(wave))}"
    if crews := crews_of(attempts.every):
        yield "workers", "; ".join(_workers(name, crew) for name, crew in crews.items())
    if (prices := run.recipe.launch.prices) is not None:
        yield "price", f"{sum(price_of(entry, prices) for entry in attempts.every):,.2f} {prices.currency}"
    sizes = (humanize.naturalsize(size) for size in (totals.read_bytes, totals.written_bytes))
    yield "store", "read {}, written {}".format(*sizes)
    yield "more", commands.about(run.store_url, "cost", run.plan.run_id)


def _workers(stage: str, crew: Crew) -> str:
    made = f"{counted(crew.units, 'unit')} in {duration(crew.worker_s)} of workers"
    return f"{stage}: at most {counted(crew.largest, 'worker')}, {made}{crew.ended}"


def _left(left: Sequence[Left], at_work: int) -> str:
    recorded, others = (sum(one.count for one in left if one.recorded is each) for each in (True, False))
    working = f" and {at_work} {'is' if at_work == 1 else 'are'} at work" if at_work else ""
    more = f"; {others} more {'is' if others == 1 else 'are'} not in the ledger" if others else ""
    return f"{recorded} left no artifact{working}{more}"


def _links(run: AnyRun) -> Iterator[tuple[str, str]]:
    for name, words in ((PLAN_FILE, "the frozen plan, with the whole recipe"), (METRICS_FILE, "all numbers")):
        if store.size(store.join(run.url, name)) is not None:
            yield f"{name}: {words}", f"../{name}"


class Pages:
    """Observer that writes a run's page; :meth:`done` is called after each wave. A failure to write ends no run."""

    def __init__(self, run: AnyRun, note: Note) -> None:
        self.collected = Collected(run)
        """The facts that the page is made from."""
        self.rests = False
        """Whether the page in the store is known to be current."""
        self.finished: str | None = None
        """Digest of the page of the finished run, once it is written; None if anything is missing in it."""
        self._note, self._whole, self._begun = note, True, False
        self._written_s, self._took_s = -float("inf"), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._try(lambda: self._end(error))

    def begin(self) -> None:
        """Write the page before the first wave that is made: until then it says how the last process ended."""
        if not self._begun:
            self._begun = True
            self._try(lambda: self._write("running"))

    def done(self, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
        """Add the artifacts of a wave. Write the page when an iteration has ended or a policy was evaluated."""
        pairs = list(zip(requests, manifests, strict=True))
        self._try(lambda: self._add(pairs))
        ends = any(request.stage == "fragment" or registry.trains(request.stage) for request in requests)
        if ends and time.monotonic() - self._written_s >= SHARE * self._took_s:
            self._try(lambda: self._write("running"))

    def passed(self, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
        """Add the artifacts of a wave that was already current. The page is written after a later wave."""
        pairs = list(zip(requests, manifests, strict=True))
        self._try(lambda: self._add(pairs))

    def _add(self, pairs: Sequence[tuple[Request, Manifest]]) -> None:
        for request, manifest in pairs:
            with self.collected.naming_damage(named(place_of(request.slot), manifest.stage)):
                self.collected.add(request.slot, manifest)

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            data = b"" if self.rests else self._write("finished")
            whole = self._whole and not self.collected.damaged and not self.collected.references.faults
            self.finished = sha256(data) if whole else None
            return
        state = "failed" if isinstance(error, Exception) else "stopped"
        state = "suspended" if isinstance(error, ApprovalError) else state
        state = "limited" if isinstance(error, BudgetError) else state
        state = "stopped" if isinstance(error, StoppedError) else state
        self.collected.fill(states(self.collected.run))
        # As flows.running.progress writes it down.
        self._write(state, str(error) or type(error).__name__)

    def _write(self, state: str, error: str = "") -> bytes:
        began_s = time.monotonic()
        data = page(self.collected, state, error)
        store.write(address(self.collected.run), data)
        self._written_s = time.monotonic()
        self._took_s = self._written_s - began_s
        return data

    def _try(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # a run goes on without its page
            self._whole = False
            why = f"{type(error).__name__}: {first_line(error)}"
            run = self.collected.run
            again = commands.about(run.store_url, "report", run.plan.run_id)
            self._note(f"warning: the page of the report was not written ({why}); `{again}` writes it anew")
