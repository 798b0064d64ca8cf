"""One HTML file about a run: whether the held-out reward rose, the curves, and samples.

It holds no time, host or path, so equal inputs give equal bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.weights.parts import CURRENT, EMA, OLD
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.context import Context
from stages.contracts import METRICS
from stages.formats.samples import StoredSample
from stages.formats.tables import read_table
from stages.reporting.curves import Curve, Series
from stages.reporting.inputs import Inputs, Samples
from stages.reporting.numbers import Estimate
from stages.reporting.page import render
from stages.reporting.pictures import Picture, picture

PAIRS_SHOWN = 24
"""Held-out samples shown before and after."""
FAILED_SHOWN = 2
"""Failed samples shown of each iteration; all are counted."""
# Columns of the metrics of `update`.
METRICS_SHOWN = ("loss", "grad_norm", "lr", "kl", "old_deviation")


@dataclass(frozen=True)
class Card:
    """One sample."""

    name: str
    """``best``, ``worst``, ``only``, ``failed``, ``base`` or ``final``."""
    picture: Picture
    facts: Any
    """Its row: ``prompt``, ``score``, ``failed``, ``error`` and, of a rollout, ``advantage``."""


@dataclass(frozen=True)
class Group:
    """Best and worst sample of one prompt; one card if they are the same sample."""

    prompt: str
    spread: float
    """Difference of their rewards."""
    cards: list[Card]


@dataclass(frozen=True)
class Iteration:
    """The widest groups of a rollout, and some of its samples that failed."""

    k: int
    rollout: Samples
    groups: list[Group]
    failed: list[Card]
    num_failed: int


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``index.html``. Return the number of iterations and the held-out reward ``before`` and ``after``."""
    config = request.settings(contracts.Report)
    found = Inputs.read(request)
    total = len(found.rollouts) + 2
    iterations: list[Iteration] = []
    for rollout in found.rollouts:
        context.progress("reporting", len(iterations), total)
        iterations.append(_iteration(rollout, found, config.groups_shown))
    context.progress("reporting", total - 1, total)
    ends, rises = _ends(found), found.change()
    page = render(
        title=config.title,
        reward=config.reward,
        counts=_counts(found),
        ends=ends,
        change=Estimate.of(rises),
        rises=rises,
        curves=_curves(found),
        pairs=list(_pairs(found)),
        iterations=iterations,
        metrics=_metrics(found.updates),
        artifacts=[_row(manifest) for manifest in found.manifests],
    )
    context.attempt.put(contracts.Report.PAGE, page)
    context.progress("reporting", total, total)
    return {"iterations": found.iterations} | {name: end.mean for name, end in ends.items()}


def _counts(found: Inputs) -> dict[str, int]:
    return {
        "iteration": found.iterations,
        "training sample": sum(len(rollout.table) for rollout in found.rollouts),
        "held-out sample": len(found.evaluations[0].table) if found.evaluations else 0,
    }


def _ends(found: Inputs) -> dict[str, Estimate]:
    """Return the held-out reward of the first and of the last evaluation."""
    ends = found.evaluations[:1] + found.evaluations[1:][-1:]
    named = zip(("before", "after"), (samples.estimate for samples in ends), strict=False)
    return {name: estimate for name, estimate in named if estimate.n}


def _curves(found: Inputs) -> list[Curve]:
    """Return training and held-out reward by policy version; the loss of a run without rollouts."""
    reward = [
        Series("training, mean of each iteration ± 1 standard error", _points(found.rollouts), line=True),
        Series("held-out ± 1 standard error", _points(found.evaluations), line=False),
    ]
    curves = [Curve("Reward", "policy version (iterations trained)", [s for s in reward if s.known])]
    if found.updates and not found.rollouts:
        losses = pd.concat([read_table(update, METRICS) for update in found.updates])
        steps = zip(losses["step"], losses["loss"], strict=True)
        points = [(int(step), Estimate(float(loss), float("nan"), 1)) for step, loss in steps]
        curves.append(Curve("Loss", "optimizer step", [Series("loss", points, line=True)]))
    return [curve for curve in curves if any(series.known for series in curve.series)]


def _points(found: list[Samples]) -> list[tuple[int, Estimate]]:
    return [(samples.iteration, samples.estimate) for samples in found]


def _pairs(found: Inputs) -> Iterator[tuple[Card, Card]]:
    """Yield held-out samples, evenly spaced, of the base and of the final policy."""
    if len(found.evaluations) < 2:
        return
    base, final = found.evaluations[0], found.evaluations[-1]
    common = [sample_id for sample_id in base.table.index if sample_id in final.table.index]
    shown = min(PAIRS_SHOWN, len(common))
    ids = [common[i * len(common) // shown] for i in range(shown)]
    before, after = base.load(ids), final.load(ids)
    for i in ids:
        yield _card("base", base.table, before[i]), _card("final", final.table, after[i])


def _card(name: str, table: Any, sample: StoredSample) -> Card:
    return Card(name, picture(sample), table.loc[sample.sample_id])


def _iteration(rollout: Samples, found: Inputs, groups_shown: int) -> Iteration:
    table = rollout.table
    table = table.assign(advantage=found.advantages_of(rollout).reindex(table.index))
    scored = table[table["valid"]].groupby("prompt_id", sort=False)["score"]
    spreads = (scored.max() - scored.min()).sort_values(ascending=False, kind="stable").head(groups_shown)
    best, worst = scored.idxmax()[spreads.index], scored.idxmin()[spreads.index]
    failed = list(table.index[table["failed"]])
    stored = rollout.load(sorted({*best, *worst, *failed[:FAILED_SHOWN]}))
    groups: list[Group] = []
    for group, spread in spreads.items():
        names = ("only",) if best[group] == worst[group] else ("best", "worst")
        ids = zip(names, (best[group], worst[group]), strict=False)
        cards = [_card(name, table, stored[i]) for name, i in ids]
        groups.append(Group(cards[0].facts["prompt"], spread, cards))
    shown = [_card("failed", table, stored[i]) for i in failed[:FAILED_SHOWN]]
    return Iteration(rollout.iteration, rollout, groups, shown, len(failed))


def _metrics(updates: list[Artifact]) -> Any:
    """Return a row an iteration: the metrics of its last optimizer step."""
    rows = [
        read_table(update, METRICS).tail(1).assign(iteration=update.manifest.iteration)
        for update in updates
        if update.names(METRICS)
    ]
    table = pd.concat(rows) if rows else pd.DataFrame()
    return table[[name for name in ("iteration", "step", *METRICS_SHOWN) if name in table]]


def _row(manifest: Manifest) -> tuple[str, str, str, str]:
    """Return stage, iteration and content of an artifact, and the policy parts that it holds or was made with."""
    parts = {part: manifest.part_content(part) for part in (CURRENT, OLD, EMA) if manifest.has_part(part)}
    made_with = {
        ", ".join(source.parts) or role: source.content
        for role in ("policy", "export")
        for source in manifest.inputs.get(role, ())
    }
    policy = ", ".join(f"{name} {content[:12]}" for name, content in (parts or made_with).items())
    iteration = "–" if manifest.iteration is None else str(manifest.iteration)
    return manifest.stage, iteration, manifest.content[:12], policy or "–"
