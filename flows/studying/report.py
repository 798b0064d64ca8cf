"""The report of a study: its page and its numbers. Both are made from the artifacts, and nothing reads them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from cosmos_rl_core.estimates.estimate import Estimate, mean_of_independent
from cosmos_rl_core.rewards._base.answers import finite
from cosmos_rl_core.storage import store
from flows.studying.outcomes import Outcome, against, alike, curves, difference, outcomes_of
from flows.studying.study import NUMBERS, Study
from flows.studying.what_if import UNCHANGED
from stages.artifacts.slots import one_look
from stages.reporting import contracts
from stages.reporting.curves import WIDE, Series, curve
from stages.reporting.page import render

INKS = ("#3b6fb5", "#c2571a", "#2f8f5b", "#8a4fbf", "#b5383f", "#8a7a1f", "#1f8a94", "#b04a8f")
"""Colours of curves, in turn."""


@dataclass(frozen=True)
class Row:
    """A setting of a study."""

    setting: str
    outcomes: tuple[Outcome, ...]
    """Outcomes of its runs with unshuffled rewards, by seed."""
    value: Estimate
    """The mean held-out number of the setting, with its error over seeds; over prompts if there is a single run."""
    above_controls: Estimate
    """Difference from runs with shuffled rewards, at the same policy version; missing without controls."""
    above_first: Estimate
    """Difference from the first setting at the same policy version, paired."""
    ended: str
    """Why and where runs ended early, controls too; "" if none did."""
    by: str
    """Name of the number that ranks its policies."""

    @property
    def reached(self) -> str:
        """Return the policy versions that the numbers belong to, with commas between."""
        return ", ".join(str(k) for k in sorted({one.last for one in self.outcomes if one.last is not None}))

    @property
    def drift(self) -> float | None:
        """Return the largest drift before an update; None if all were on rollouts of the run's own policies."""
        return max((drift for one in self.outcomes for drift in one.drifts.values()), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        numbers = {"value": self.value, "above_controls": self.above_controls, "above_first": self.above_first}
        runs = [
            {"run": one.member.run, "seed": one.member.seed, "figures": one.figures, "drifts": one.drifts}
            for one in self.outcomes
        ]
        return {"setting": self.setting, "by": self.by, "ended": self.ended, "drift": self.drift, "runs": runs} | {
            name: {"mean": finite(one.mean), "error": finite(one.error)} for name, one in numbers.items()
        }


@dataclass(frozen=True)
class Report:
    """The settings of a study, compared on held-out data."""

    study: Study
    folder: str
    rows: tuple[Row, ...]
    by: str
    """Name of the number that ranks policies."""

    @property
    def page(self) -> str:
        """Return the URL of its page."""
        return store.join(self.folder, contracts.Report.PAGE)

    @property
    def header(self) -> list[str]:
        """Return the names of the columns."""
        names = ["setting", "held-out number", "policy", f"against {self.rows[0].setting!r}" if self.rows else ""]
        if self.study.of == "what-if":
            names += ["against shuffled rewards", "drift"]
        return [*names, "runs"]

    def cells(self) -> Iterator[list[str]]:
        """Yield a row of the table for each setting."""
        for row in self.rows:
            first = row is self.rows[0]
            cells = [row.setting, f"{row.by} {row.value}", row.reached, "" if first else _told(row.above_first)]
            if self.study.of == "what-if":
                cells += [_told(row.above_controls), "" if row.drift is None else f"{row.drift:.3g}"]
            yield [*cells, ", ".join(one.member.run for one in row.outcomes)]

    def differences(self) -> Iterator[tuple[Row, Row, Estimate]]:
        """Yield every setting, each other one, and by how much the first is above the second."""
        for row in self.rows:
            for other in self.rows:
                if other is not row and (found := difference(row.outcomes, other.outcomes)).n:
                    yield row, other, found

    def matrix(self) -> Iterator[list[str]]:
        """Yield a row of the table of differences for each setting."""
        found = {(row.setting, other.setting): str(moved) for row, other, moved in self.differences()}
        for row in self.rows:
            yield [row.setting, *(found.get((row.setting, other.setting), "") for other in self.rows)]

    @property
    def result(self) -> str:
        """Return each setting and its number, in one line."""
        return "; ".join(f"{row.setting}: {row.value}" for row in self.rows) or "no run has a held-out number yet"

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        for row in self.rows:
            told = [f"{row.by} {row.value}", f"policy {row.reached}"]
            if row is not self.rows[0]:
                told += [f"{row.above_first} against {self.rows[0].setting!r}"] if row.above_first.n else []
            told += [f"{row.above_controls} against shuffled rewards"] if row.above_controls.n else []
            told += [f"drift {row.drift:.3g}"] if row.drift is not None else []
            told += ["ended early"] if row.ended else []
            yield f"{row.setting:<28} {', '.join(told)}"
        yield f"{'page':<28} {self.page}"

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        found = {"study": self.study.name, "of": self.study.of, "source": self.study.source, "page": self.page}
        differences = [
            {"setting": row.setting, "above": other.setting, "mean": finite(moved.mean), "error": finite(moved.error)}
            for row, other, moved in self.differences()
        ]
        found |= {"by": self.by, "settings": [row.as_json() for row in self.rows]}
        return found | {"differences": differences}


def report_of(study: Study, store_url: str, ended: Mapping[str, str] | None = None) -> Report:
    """Return the report of a study. ``ended`` has, by the id of a run, why it ended before its planned version."""
    with one_look():
        outcomes = outcomes_of(study, store_url)
    grouped = {setting: [one for one in outcomes if one.member.setting == setting] for setting in study.settings}
    first = next((_plain(some) for some in grouped.values() if _plain(some)), [])
    rows = [_row(setting, some, first, ended or {}) for setting, some in grouped.items() if _plain(some)]
    return Report(study, study.url(store_url), tuple(rows), first[0].by if first else "")


def write_report(study: Study, store_url: str, ended: Mapping[str, str] | None = None) -> Report:
    """Write page and numbers, and return the report."""
    report = report_of(study, store_url, ended)
    text = json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n"
    store.write(store.join(report.folder, NUMBERS), text.encode())
    store.write(report.page, page_of(report))
    return report


def page_of(report: Report) -> bytes:
    """Return the page as HTML."""
    return render(
        "study.html",
        title=report.study.name,
        report=report,
        what_if=report.study.of == "what-if",
        unchanged=UNCHANGED,
        seeds=len({one.member.seed for row in report.rows for one in row.outcomes}),
        drawn=_drawn(report),
        inks=INKS,
        keys=[(row.setting, _ink(i)) for i, row in enumerate(report.rows)],
    )


def _row(setting: str, some: Sequence[Outcome], first: Sequence[Outcome], ended: Mapping[str, str]) -> Row:
    plain, controls = _plain(some), [one for one in some if one.member.control]
    values = [one.figures[one.last] for one in plain if one.last is not None]
    alone = len(plain) == 1
    above = against(plain[0], controls, by_chance=True) if alone else Estimate.missing()
    moved = Estimate.missing() if first and first[0] is plain[0] else difference(plain, first)
    told = [f"{one.member.words}: {ended[one.member.run]}" for one in some if one.member.run in ended]
    value = plain[0].estimate if alone else mean_of_independent(values)
    return Row(setting, tuple(plain), value, above, moved, "; ".join(told), plain[0].by)


def _plain(some: Sequence[Outcome]) -> list[Outcome]:
    return [one for one in some if not one.member.control]


def _told(found: Estimate) -> str:
    return str(found) if found.n else ""


def _drawn(report: Report) -> Markup | None:
    """Return curves of the settings that are judged like the first; None if none has two points."""
    first = report.rows[0].outcomes[0] if report.rows else None
    series = [
        Series(row.setting, points, line=True, ink=_ink(i))
        for i, row in enumerate(report.rows)
        if first is not None and alike(row.outcomes[0], first) and len(points := [*curves(row.outcomes)]) > 1
    ]
    return curve(series, "policy version", WIDE) if series else None


def _ink(i: int) -> str:
    return f"ink{i % len(INKS)}"
