"""Comparison of two runs, as text and as JSON."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.table import Column, Table

from cosmos_rl_core.estimates.digits import number, signed
from flows.comparing.artifacts import Artifacts, artifacts
from flows.comparing.pictures import Pair, Pictures, pictures
from flows.comparing.scores import Difference, differences
from flows.comparing.settings import Data, Setting, data, origins, settings
from flows.comparing.side import Side
from flows.comparing.weights import Weights, weights
from flows.library.opened_run import open_run

SHOWN = 8
"""Tensors that are listed."""


@dataclass(frozen=True)
class Comparison:
    """Two runs, and all that was compared."""

    a: Side
    b: Side
    artifacts: Artifacts
    settings: Sequence[Setting]
    """Settings that differ."""
    origins: Sequence[Setting]
    """Base models, first weights, versions and numerics that differ."""
    data: Sequence[Data]
    scores: Sequence[Difference]
    weights: Weights | None
    pictures: Pictures | None

    def parts(self) -> Iterator[str | Table]:
        """Yield lines and tables to print, in order."""
        for letter, side in (("A", self.a), ("B", self.b)):
            yield f"{letter}  {side.name}: {side.words}  ({side.run.url})"
        yield f"{self.artifacts.words}\n"
        yield from _named("Settings that differ", self.setting_rows(), ["setting", "A", "B"])
        yield from _named("Data", [list(row) for row in self.data_rows()], ["data", "A", "B", ""])
        yield from _named("Artifacts", self.stage_rows(), STAGES)
        for title, rows in self.score_tables():
            yield from _named(title, rows, SCORES)
        if self.weights is not None:
            yield f"Weights of policy {self.weights.version}: {self.weight_words()}"
            yield from _named("", self.tensor_rows(), TENSORS)
        if self.pictures is not None:
            yield f"Pictures: {self.pictures.words}"

    def setting_rows(self) -> list[list[str]]:
        """Return a row for each setting and origin that differs."""
        return [
            [one.name if one.decides else f"{one.name} (decides no result)", _shown(one.a), _shown(one.b)]
            for one in (*self.settings, *self.origins)
        ]

    def data_rows(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield a row for each kind of data."""
        for one in self.data:
            yield one.what, one.a, one.b, ", ".join(filter(None, ["equal" if one.equal else "different", one.shared]))

    def stage_rows(self) -> list[list[str]]:
        """Return a row for each stage."""
        return [
            [one.stage, *(str(count or "") for count in (one.equal, one.different, one.only_a, one.only_b)), one.first]
            for one in self.artifacts.stages
        ]

    def score_tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield for each place a title, and a row for each reward or loss."""
        for (where, how), found in groupby(self.scores, key=lambda one: (one.where, one.how)):
            rows = [[one.name, str(one.a), str(one.b), _change(one)] for one in found]
            yield f"{where[0].upper()}{where[1:]} ({how})", rows

    def tensor_rows(self) -> list[list[str]]:
        """Return a row for each of the tensors that are farthest apart."""
        found = self.weights.tensors[:SHOWN] if self.weights is not None else []
        return [[one.name, number(one.apart), number(one.moved), number(one.share)] for one in found]

    def weight_words(self) -> str:
        """Return in one sentence how far the weights are apart."""
        if (found := self.weights) is None:
            return "none in both"
        if not math.isfinite(found.apart) or not found.tensors:
            return found.words
        moved = f"A moved by {number(found.moved_a)}, B by {number(found.moved_b)}"
        apart = f"{number(found.apart)} apart, {number(found.began)} at version 0"
        return f"{found.words}; {apart}; {moved}; cosine of the moves {number(found.cosine)}"

    def as_json(self) -> dict[str, Any]:
        """Return everything for scripts; numbers that are not finite are None."""
        found = {name: getattr(self, name) for name in ("settings", "origins", "data", "scores", "weights")}
        names = {"a": self.a.run.url, "b": self.b.run.url, "equal": self.artifacts.equal, "first": self.artifacts.first}
        shown = self.pictures
        pairs = [] if shown is None else [_pair(one) for one in shown.pairs]
        plain = {name: [asdict(one) for one in value] if isinstance(value, list) else value and asdict(value)
                 for name, value in found.items()}  # fmt: skip
        stages = [asdict(one) for one in self.artifacts.stages]
        return _finite(names | plain | {"artifacts": stages, "pictures": pairs})


STAGES = ["stage", "equal", "different", "only A", "only B", "first that differs"]
SCORES = ["mean ± standard error", "A", "B", "B − A"]
TENSORS = ["tensor", "apart", "A moved", "apart / moved"]


def compare(a: str, b: str, store: str) -> Comparison:
    """Compare two runs of a store, or of two stores by their URLs. Reads only; each may be at work or have failed.

    Raises :class:`ConfigError` if there is no such run, :class:`ArtifactError` if a file is damaged.
    """
    one, other = Side(open_run(a, store)), Side(open_run(b, store))
    return Comparison(
        one,
        other,
        artifacts(one, other),
        settings(one, other),
        origins(one, other),
        data(one, other),
        differences(one, other),
        weights(one, other),
        pictures(one, other),
    )


def _pair(one: Pair) -> dict[str, Any]:
    given = {"references": one.a.references} if one.a.references else {}
    return {"sample": one.a.sample, "apart": one.apart} | given


def _change(one: Difference) -> str:
    sign = "+" if one.change.mean >= 0 else ""
    return f"{sign}{one.change}" if math.isfinite(one.change.error) else signed(one.change.mean)


def _shown(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def _named(title: str, rows: Sequence[Sequence[str]], names: Sequence[str]) -> Iterator[str | Table]:
    if not rows:
        return
    first, *others = names
    table = Table(Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in others), title=title,
                  title_justify="left", box=None, pad_edge=False)  # fmt: skip
    for row in rows:
        table.add_row(*row)
    yield table
    yield ""


def _finite(value: Any) -> Any:
    """Return JSON data with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
