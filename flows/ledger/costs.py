"""The cost of a run: sums of its ledger by stage, by iteration and by sample, with or without prices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import humanize
from rich.table import Table

from cosmos_rl_core.config.clusters import PricesConfig
from cosmos_rl_core.errors import counted
from flows.ledger.pages import AT_WORK, HOUR_S, Entry, Page, entries
from flows.planning.base import AnyRun
from stages.execution.spending import Crew, Spent

GB = 10**9
ITERATIONS = 12
"""Newest iterations that the text shows."""


@dataclass(frozen=True)
class Cost:
    """Sums over some attempts."""

    name: str
    """The stage, or the iteration."""
    entries: tuple[Entry, ...] = field(repr=False)
    wall_s: float
    """Seconds from when their waves were asked for to their ends; 0 for a stage, which shares its waves with others."""
    prices: PricesConfig | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return all sums: seconds, bytes, counts, and ``price`` if there are prices.

        ``startup_s`` and ``startup_device_s`` are of the attempts whose start-up is known, and absent without any.
        """
        spent = [entry.spent for entry in self.entries]
        sums = {part: sum(getattr(one, part) for one in spent) for part in Spent.model_fields}
        return {
            "name": self.name,
            "attempts": len(self.entries),
            "retries": self.retries,
            "at_work": self.at_work,
            "wall_s": round(self.wall_s, 3),
            "queued_s": round(sum(entry.queued_s for entry in self.entries), 3),
            "process_s": round(sum(entry.seconds for entry in self.entries), 3),
            "device_s": round(self.device_s, 3),
            "lost_s": round(sum(entry.seconds for entry in self.entries if entry.failed), 3),
            "outside_s": round(sum(entry.outside_s for entry in self.entries), 3),
            **self.startup.as_json(),
            **{part: round(found, 3) for part, found in sums.items()},
            **({} if self.prices is None else {"price": self.price}),
        }

    @property
    def device_s(self) -> float:
        """Return the device seconds."""
        return sum(entry.device_s for entry in self.entries)

    @property
    def startup(self) -> "Startup":
        """Return the start-up of its attempts."""
        return startup_of(self.entries)

    @property
    def retries(self) -> int:
        """Return the number of attempts that left no artifact."""
        return sum(entry.failed for entry in self.entries)

    @property
    def at_work(self) -> int:
        """Return the number of attempts that have not ended yet."""
        return sum(entry.outcome == AT_WORK for entry in self.entries)

    @property
    def price(self) -> float | None:
        """Return the price; None without prices."""
        if self.prices is None:
            return None
        return round(sum(price_of(entry, self.prices) for entry in self.entries), 4)


@dataclass(frozen=True)
class Startup:
    """The start-up of some attempts: seconds of their processes before the first step of their work."""

    seconds: float = 0.0
    device_s: float = 0.0
    known: int = 0
    """Number of attempts in the sums."""
    unknown: int = 0
    """Number of attempts whose processes never reported anything."""

    def plus(self, other: "Startup") -> "Startup":
        """Return the start-up of the attempts of both."""
        return Startup(
            self.seconds + other.seconds,
            self.device_s + other.device_s,
            self.known + other.known,
            self.unknown + other.unknown,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the sums, and the number of attempts whose start-up is unknown."""
        sums = {"startup_s": round(self.seconds, 3), "startup_device_s": round(self.device_s, 3)}
        return (sums if self.known else {}) | {"startup_unknown": self.unknown}

    def __str__(self) -> str:
        if not self.known:
            return "their start-up is not known" if self.unknown else "no start-up"
        rest = f"; unknown for {counted(self.unknown, 'attempt')}" if self.unknown else ""
        return f"of which start-up {device_time(self.device_s)}{rest}"


def startup_of(entries: Iterable[Entry]) -> Startup:
    """Return the start-up of attempts."""
    found = Startup()
    for entry in entries:
        seconds = entry.startup_s
        one = Startup(unknown=1) if seconds is None else Startup(seconds, entry.devices * seconds, known=1)
        found = found.plus(one)
    return found


def crews_of(entries: Iterable[Entry]) -> dict[str, Crew]:
    """Return the workers of all attempts at each elastic stage, by its name. Units count when an artifact is made."""
    found: dict[str, Crew] = {}
    for entry in entries:
        if (crew := entry.crew) is not None:
            before = found.get(name_of(entry), Crew(workers=0, largest=0, units=0, of=0))
            made = crew.of if entry.outcome == "made" else 0
            found[name_of(entry)] = Crew(
                workers=0,
                largest=max(before.largest, crew.largest),
                units=before.units + made,
                of=before.of + made,
                lost=before.lost + crew.lost,
                gave_back=before.gave_back + crew.gave_back,
                worker_s=before.worker_s + crew.worker_s,
            )
    return found


def on_devices(entries: Iterable[Entry]) -> Startup:
    """Return the start-up of the attempts that had devices."""
    return startup_of(entry for entry in entries if entry.devices)


@dataclass(frozen=True)
class RunCost:
    """The cost of a run."""

    run: str
    stages: list[Cost]
    iterations: list[Cost]
    total: Cost
    samples: int
    """Number of samples in an iteration."""
    prices: PricesConfig | None

    def as_json(self) -> dict[str, Any]:
        """Return everything for scripts: ``total``, ``stages``, ``iterations``, ``per_iteration``, ``per_sample``."""
        each = self._of_iterations()
        return {
            "run": self.run,
            "currency": None if self.prices is None else self.prices.currency,
            "total": self.total.as_json(),
            "stages": [one.as_json() for one in self.stages],
            "iterations": [one.as_json() for one in self.iterations],
            "samples_per_iteration": self.samples,
            "per_iteration": each,
            "per_sample": {name: value / self.samples for name, value in each.items()},
        }

    def _of_iterations(self) -> dict[str, float]:
        """Return the means over iterations; empty without iterations."""
        count = len(self.iterations)
        if not count:
            return {}
        means = {
            "wall_s": sum(one.wall_s for one in self.iterations) / count,
            "device_s": sum(one.device_s for one in self.iterations) / count,
        }
        startups = [on_devices(one.entries) for one in self.iterations]
        if not any(one.unknown for one in startups):
            means["startup_device_s"] = sum(one.device_s for one in startups) / count
        if self.prices is not None:
            means["price"] = sum(one.price or 0.0 for one in self.iterations) / count
        return {name: round(value, 6) for name, value in means.items()}

    def parts(self) -> Iterator[str | Table]:
        """Yield the tables and lines to print."""
        yield _table("stage", [*self.stages, self.total], self.prices)
        yield ""
        yield _startups([*self.stages, self.total])
        yield ""
        yield f"{device_time(self.total.device_s)} of device time, {on_devices(self.total.entries)}"
        if self.iterations:
            yield ""
            shown = self.iterations[-ITERATIONS:]
            yield _table("iter.", shown, self.prices)
            if len(shown) < len(self.iterations):
                yield f"the newest {len(shown)} of {len(self.iterations)} iterations; --json has all"
            yield ""
            yield from self._means()
        lost_s = sum(entry.seconds for entry in self.total.entries if entry.failed)
        if lost_s:
            yield f"{counted(self.total.retries, 'attempt')} left no artifact: {duration(lost_s)} of processes"
        if working := self.total.at_work:
            yield f"{counted(working, 'attempt')} {'is' if working == 1 else 'are'} at work"

    def _means(self) -> Iterator[str]:
        each = self._of_iterations()
        for what, share in (("an iteration", 1), (f"a sample, of {self.samples} each", self.samples)):
            wall_s = each["wall_s"] / share
            time = duration(wall_s) if wall_s >= 1 else f"{wall_s:.3g} s"
            words = [time, f"{device_time(each['device_s'] / share)} of device time"]
            if "startup_device_s" in each:
                words.append(f"of which start-up {device_time(each['startup_device_s'] / share)}")
            if self.prices is not None:
                words.append(f"{each['price'] / share:.3g} {self.prices.currency}")
            yield f"{what}: {', '.join(words)}"


def cost_of(run: AnyRun, found: Sequence[Page], prices: PricesConfig | None) -> RunCost:
    """Return the cost of a run from its pages, after :func:`flows.ledger.pages.marked`."""
    stages: dict[str, list[Entry]] = {}
    for entry in entries(found):
        stages.setdefault(name_of(entry), []).append(entry)
    inside = sorted((page for page in found if page.iteration is not None), key=lambda page: page.iteration or 0)
    iterations = [_sum(str(k), list(some), prices) for k, some in groupby(inside, key=lambda page: page.iteration)]
    return RunCost(
        run=run.plan.run_id,
        stages=[Cost(name, tuple(some), 0.0, prices) for name, some in stages.items()],
        iterations=iterations,
        total=_sum("all", found, prices),
        samples=_samples(run),
        prices=prices,
    )


def _samples(run: AnyRun) -> int:
    """Return the number of samples of an iteration: of its rollout, or of all its optimizer steps."""
    train = run.recipe.train
    options: Any = train.train_policy
    return train.train_batch_per_replica * (1 if options.rewarded else options.steps_per_iteration)


def _sum(name: str, found: Sequence[Page], prices: PricesConfig | None) -> Cost:
    return Cost(name, tuple(entries(found)), sum(page.wall_s for page in found), prices)


def name_of(entry: Entry) -> str:
    """Return the name by which ``status`` shows a stage, such as ``reward-ocr``; the kind if it makes shared data."""
    last = entry.slot.rpartition("/")[2]
    return last if entry.slot.startswith("runs/") else entry.stage


def price_of(entry: Entry, prices: PricesConfig) -> float:
    """Return the price of an attempt."""
    device_hour = prices.stage_device_hour.get(entry.stage, prices.device_hour)
    hours = (entry.seconds if entry.crew is None else entry.crew.worker_s) / HOUR_S
    moved = entry.spent.read_bytes * prices.read_gb + entry.spent.written_bytes * prices.written_gb
    return hours * (entry.devices * device_hour + prices.process_hour) + moved / GB


def _table(first: str, costs: Sequence[Cost], prices: PricesConfig | None) -> Table:
    money = [] if prices is None else [prices.currency]
    lost = ["lost"] if any(one.retries for one in costs) else []
    columns = ("queued", "start-up", "first step", "busy", "waiting", "other", "devices", "read", "written")
    table = _columns(first, "tries", *lost, *columns, *money)
    for one in costs:
        spent = [entry.spent for entry in one.entries]
        counts = [str(len(one.entries)), *(str(one.retries or "-") for _ in lost)]
        seconds = (
            sum(entry.queued_s for entry in one.entries),
            one.startup.seconds,
            sum(each.first_step_s for each in spent),
            sum(each.busy_s for each in spent),
            sum(each.waiting_s for each in spent),
            sum(entry.outside_s for entry in one.entries),
            one.device_s,
        )
        moved = (sum(each.read_bytes for each in spent), sum(each.written_bytes for each in spent))
        sizes = (humanize.naturalsize(size, gnu=True) for size in moved)
        cells = (*counts, *map(duration, seconds), *sizes)
        table.add_row(one.name, *cells, *([f"{one.price:.4g}"] if money else []))
    return table


def _startups(costs: Sequence[Cost]) -> Table:
    parts = ("interpreter", "imports", "load")
    table = _columns("start-up", *parts, "devices")
    for one in costs:
        known = [entry.spent for entry in one.entries if entry.startup_s is not None]
        sums = [sum(getattr(spent, f"{part}_s") for spent in known) for part in parts]
        table.add_row(one.name, *map(duration, (*sums, one.startup.device_s)))
    return table


def _columns(first: str, *titles: str) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column(first, overflow="fold")
    for title in titles:
        table.add_column(title, justify="right", overflow="fold")
    return table


def duration(seconds: float) -> str:
    """Return a number of seconds in words, such as ``12.3 s``, ``4.5 min`` or ``6.7 h``."""
    units = ((86400 * 2, 86400, "d"), (HOUR_S * 2, HOUR_S, "h"), (120, 60, "min"))
    size, unit = next(((size, unit) for least, size, unit in units if seconds >= least), (1, "s"))
    return f"{seconds / size:.1f} {unit}" if seconds else "-"


def device_time(seconds: float) -> str:
    """Return device seconds in words, such as ``12.3 s``, ``4.56 min`` or ``789 h``, the unit of limits and prices."""
    units = ((2 * HOUR_S, HOUR_S, "h"), (120, 60, "min"))
    size, unit = next(((size, unit) for least, size, unit in units if seconds >= least), (1, "s"))
    found = seconds / size
    return f"{found:,.0f} {unit}" if found >= 100 else f"{found:.3g} {unit}"
