"""One HTML file about a run: whether held-out reward and loss improved, the curves, and samples.

It holds no time, host or path, so equal inputs give equal bytes. It needs no scripts, other files or addresses.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pandas as pd

from cosmos_rl_core.weights.parts import CURRENT, EMA, OLD
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.context import Context
from stages.contracts import METRICS, Update
from stages.formats.tables import read_table
from stages.reporting.curves import Curve, Series
from stages.reporting.inputs import Samples, scored_samples
from stages.reporting.losses import HeldOutLoss, best, held_out_losses, steps_of, training_losses
from stages.reporting.numbers import Estimate
from stages.reporting.over_time import Card, card, over_time
from stages.reporting.page import render
from stages.reporting.warnings import Warned, warned, z_scores

PAIRS_SHOWN = 24
"""Held-out samples shown before and after."""
FAILED_SHOWN = 2
"""Failed samples shown of each iteration; all are counted."""
# Columns of the metrics of `update`.
METRICS_SHOWN = ("loss", "grad_norm", "lr", "kl", "old_deviation")


@dataclass(frozen=True)
class Iteration:
    """The widest groups of a rollout, and some of its samples that failed."""

    rollout: Samples
    groups: list[list[Card]]
    """Best and worst sample of a prompt; one card if they are the same sample."""
    failed: list[Card]


@dataclass(frozen=True)
class Change:
    """A held-out number before and after the run."""

    ends: dict[str, Estimate]
    """The estimates ``before`` and ``after``, as far as there are any."""
    differences: Any
    """After minus before, by sample or item."""

    @property
    def mean(self) -> Estimate:
        """Return the mean difference."""
        return Estimate.of(self.differences)


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``index.html``. Return the number of iterations and the held-out reward ``before`` and ``after``."""
    config = request.settings(contracts.Report)
    updates = [Artifact(source) for source in request.inputs.get("updates", ())]
    rollouts = scored_samples(request, "rollouts", "scores")
    evaluations = scored_samples(request, "evaluations", "evaluation_scores")
    versions = config.versions or tuple(samples.iteration for samples in evaluations)
    losses, steps = held_out_losses(request), steps_of(updates)
    num_iterations, total = len(updates) or len(rollouts), len(rollouts) + 2
    iterations: list[Iteration] = []
    for rollout in rollouts:
        context.progress("reporting", len(iterations), total)
        iterations.append(_iteration(rollout, updates, config.groups_shown))
    context.progress("reporting", total - 1, total)
    ends = evaluations[:1] + evaluations[1:][-1:]
    reward = _change([samples.table["score"] for samples in ends], [samples.estimate for samples in ends])
    loss_ends = losses[:1] + losses[1:][-1:]
    scored = [part for s in (*rollouts, *evaluations) for part in (s.artifact, s.scores) if part]
    warnings = [Artifact(source) for source in request.inputs.get("warnings", ())]
    page = render(
        "page.html",
        title=config.title,
        init=config.init,
        reward=config.reward,
        counts={
            "iteration": num_iterations,
            "training sample": sum(len(rollout.table) for rollout in rollouts),
            "held-out sample": len(ends[0].table) if ends else 0,
        },
        held_out=reward,
        held_out_loss=_change([loss.items for loss in loss_ends], [loss.estimate for loss in loss_ends]),
        best=best(losses),
        steps=steps,
        curves=_curves(rollouts, [*zip(versions, evaluations, strict=True)], updates, losses),
        warned=[one for pair in zip(warnings, rollouts, strict=False) for one in _warned(*pair)],
        z_scores=z_scores(warnings),
        over_time=over_time(evaluations, versions),
        pairs=list(_pairs(*ends)) if len(ends) > 1 else [],
        iterations=iterations,
        metrics=_metrics(updates),
        artifacts=_artifacts([*updates, *scored, *(loss.artifact for loss in losses)]),
    )
    context.attempt.put(contracts.Report.PAGE, page)
    context.progress("reporting", total, total)
    return {"iterations": num_iterations} | {name: mean.mean for name, mean in reward.ends.items()}


def _change(values: list[Any], estimates: list[Estimate]) -> Change:
    """Return the change between two Series by id; one or none has no change."""
    ends = {name: found for name, found in zip(("before", "after"), estimates, strict=False) if found.n}
    # Of each sample or item that both have.
    differences = (values[1] - values[0]).dropna() if len(ends) == 2 else pd.Series(dtype="float64")
    return Change(ends, differences)


def _curves(
    rollouts: list[Samples],
    evaluations: list[tuple[int, Samples]],
    updates: list[Artifact],
    losses: list[HeldOutLoss],
) -> list[Curve]:
    """Return training and held-out reward by policy version; held-out loss, and the loss of a run without rollouts."""
    training = [(samples.iteration, samples.estimate) for samples in rollouts]
    held_out = [(version, samples.estimate) for version, samples in evaluations]
    reward = [
        Series("training, mean of each iteration ± 1 standard error", training, line=True),
        Series("held-out ± 1 standard error", held_out, line=False),
    ]
    curves = [Curve("Reward", "policy version (iterations trained)", [s for s in reward if s.rows])]
    if updates and not rollouts:
        curves.append(Curve("Training loss", "optimizer steps done", [training_losses(updates)]))
    steps = steps_of(updates)
    points = [(steps[loss.version], loss.estimate) for loss in losses if loss.version in steps]
    by_step = Series("held-out loss ± 1 standard error", points, line=False)
    curves.append(Curve("Held-out loss", "optimizer steps done", [by_step]))
    return [curve for curve in curves if any(series.rows for series in curve.series)]


def _warned(warning: Artifact, rollout: Samples) -> list[Warned]:
    """Return what tripped in an iteration."""
    return warned(warning.json(contracts.Warn.EVIDENCE), rollout)


def _pairs(base: Samples, final: Samples) -> Iterator[tuple[Card, Card]]:
    """Yield held-out samples, evenly spaced, of the base and of the final policy."""
    common = [sample_id for sample_id in base.table.index if sample_id in final.table.index]
    shown = min(PAIRS_SHOWN, len(common))
    ids = [common[i * len(common) // shown] for i in range(shown)]
    before, after = base.load(ids), final.load(ids)
    for i in ids:
        yield card("base", base.table, before[i]), card("final", final.table, after[i])


def _iteration(rollout: Samples, updates: list[Artifact], groups_shown: int) -> Iteration:
    table = rollout.table
    table = table.assign(advantage=_advantages(rollout, updates).reindex(table.index))
    scored = table[table["valid"]].groupby("prompt_id", sort=False)["score"]
    spreads = (scored.max() - scored.min()).sort_values(ascending=False, kind="stable")
    spreads = spreads.head(groups_shown)
    best, worst = scored.idxmax()[spreads.index], scored.idxmin()[spreads.index]
    failed = list(table.index[table["failed"]])[:FAILED_SHOWN]
    stored = rollout.load([*best, *worst, *failed])
    ends = [{"only": b} if b == w else {"best": b, "worst": w} for b, w in zip(best, worst, strict=True)]
    groups = [[card(name, table, stored[i]) for name, i in group.items()] for group in ends]
    return Iteration(rollout, groups, [card("failed", table, stored[i]) for i in failed])


def _advantages(rollout: Samples, updates: list[Artifact]) -> Any:
    """Return the advantages of the rollout's samples in an update, by sample id; empty if none trained on it."""
    for update in updates:
        if update.names(Update.ADVANTAGES):
            table = read_table(update, Update.ADVANTAGES)
            found = table[table["rollout"] == rollout.artifact.manifest.content]
            if len(found):
                return found.set_index("sample_id")["advantage"]
    return pd.Series(dtype="float64")


def _metrics(updates: list[Artifact]) -> Any:
    """Return a row an iteration: the metrics of its last optimizer step."""
    rows = [
        read_table(update, METRICS).tail(1).assign(iteration=update.manifest.iteration)
        for update in updates
        if update.names(METRICS)
    ]
    table = pd.concat(rows) if rows else pd.DataFrame()
    return table[[name for name in ("iteration", "step", *METRICS_SHOWN) if name in table]]


def _artifacts(artifacts: list[Artifact]) -> list[tuple[str, ...]]:
    """Return a row an artifact, sorted by iteration and stage: stage, iteration, content, and the policy parts that it
    holds or was made with.
    """
    order, rows = list(contracts.STAGES), list[tuple[int, int, str, str]]()
    for manifest in (artifact.manifest for artifact in artifacts):
        parts = [part for part in (CURRENT, OLD, EMA) if manifest.has_part(part)]
        held = {part: manifest.part_content(part) for part in parts} or {
            ", ".join(source.parts) or role: source.content
            for role in ("policy", "export")
            for source in manifest.inputs.get(role, ())
        }
        policy = ", ".join(f"{name} {content[:12]}" for name, content in held.items()) or "–"
        iteration = -1 if manifest.iteration is None else manifest.iteration
        rows.append((iteration, order.index(manifest.stage), manifest.content[:12], policy))
    rows.sort(key=itemgetter(0, 1))
    return [(order[stage], "–" if k < 0 else str(k), *rest) for k, stage, *rest in rows]
