"""One HTML file about a run, to look at and to send: did the held-out reward rise, and what do the samples look like?

Nothing of when or where is in it: equal inputs, equal bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.weights.parts import CURRENT, EMA, OLD
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.context import Context
from stages.contracts import METRICS
from stages.formats.samples import StoredSample, all_rows, read_index, read_unit
from stages.formats.tables import read_table
from stages.reporting import html as report_html
from stages.reporting.html import Estimate, Series, number, signed, text

PAIRS_SHOWN = 24
"""Held-out samples shown before and after."""
FAILED_SHOWN = 2
"""Failed samples shown of each iteration; all are counted."""
# Of `update`; its module needs torch.
METRICS_SHOWN = ("loss", "grad_norm", "lr", "kl", "old_deviation")


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``index.html``."""
    config = request.config
    assert isinstance(config, contracts.Report)
    found = _Inputs.read(request)
    total = len(found.rollouts) + 2
    context.progress("reporting", 0, total)
    sections = [
        _headline(found, config.reward),
        _curve(found, config.reward),
        _comparison(found),
    ]
    iterations: list[str] = []
    for done, rollout in enumerate(found.rollouts):
        context.progress("reporting", done + 1, total)
        newest = done == len(found.rollouts) - 1
        iterations.append(_iteration(rollout, found.update_of(rollout), config.groups_shown, newest))
    if iterations:
        note = "The best and the worst sample of the prompts whose rewards differ most."
        sections.append(report_html.section("Iterations", f'<p class="note">{note}</p>', *iterations))
    context.progress("reporting", total - 1, total)
    sections += [_metrics(found.updates), _provenance(found)]
    context.attempt.put(
        contracts.Report.PAGE, report_html.page(config.title, _subtitle(found, config.reward), sections)
    )
    context.progress("reporting", total, total)
    return _summary(found)


@dataclass(frozen=True)
class _Samples:
    """Generated samples with their scores.

    ``table`` is the index plus ``score, valid, error, failed``, by sample id.
    """

    source: Input
    artifact: Artifact
    scores: Artifact | None
    table: Any

    @classmethod
    def read(cls, source: Input, scores: Input | None) -> "_Samples":
        artifact, scored = Artifact(source), None if scores is None else Artifact(scores)
        table = read_index(artifact).set_index("sample_id")
        found = pd.DataFrame(columns=["sample_id", "score", "valid", "error"])
        if scored is not None:
            found = read_table(scored, contracts.Reward.SCORES).merge(
                read_table(scored, contracts.Reward.ANSWERS), on="sample_id", how="left"
            )
        found = found.set_index("sample_id").reindex(table.index)
        table["valid"] = found["valid"].eq(True)
        table["score"] = found["score"].astype("float64").where(table["valid"])
        table["failed"] = found["valid"].eq(False)
        table["error"] = found["error"].fillna("")
        return cls(source, artifact, scored, table)

    @property
    def iteration(self) -> int | None:
        """The artifact's own; evaluations have none, but their scores know the policy version."""
        made = self.artifact.manifest.iteration
        return made if made is not None or self.scores is None else self.scores.manifest.iteration

    @property
    def estimate(self) -> Estimate:
        """Mean score of the valid samples."""
        return _estimate(self.table["score"])

    def load(self, ids: Sequence[str]) -> dict[str, StoredSample]:
        """Return some samples by id, without pictures if those were deleted; only their units are read."""
        wanted = set(ids)
        if self.artifact.lacks(contracts.MEDIA):
            return {
                row["sample_id"]: StoredSample(row) for row in all_rows(self.artifact) if row["sample_id"] in wanted
            }
        numbers = sorted(self.table.loc[list(ids), "unit"].unique())
        stored = (s for n in numbers for s in read_unit(self.artifact, int(n)))
        return {s.sample_id: s for s in stored if s.sample_id in wanted}


@dataclass(frozen=True)
class _Inputs:
    rollouts: list[_Samples]
    updates: list[Artifact]
    evaluations: list[_Samples]

    @classmethod
    def read(cls, request: Request) -> "_Inputs":
        updates = [Artifact(source) for source in request.inputs.get("updates", ())]
        return cls(
            _scored(request, "rollouts", "scores"), updates, _scored(request, "evaluations", "evaluation_scores")
        )

    def update_of(self, rollout: _Samples) -> Any:
        """What an update made of the rollout, by sample id; None if nothing trained on it."""
        for update in self.updates:
            if not update.names(contracts.Update.ADVANTAGES):
                continue
            table = read_table(update, contracts.Update.ADVANTAGES)
            found = table[table["rollout"] == rollout.artifact.manifest.content]
            if len(found):
                return found.set_index("sample_id")
        return None

    @property
    def versions(self) -> list[int]:
        """The policy version of each evaluation: as its scores say, else spread evenly over the run."""
        last, spans = len(self.updates) or len(self.rollouts), max(1, len(self.evaluations) - 1)
        known = [evaluation.iteration for evaluation in self.evaluations]
        return [last * i // spans if version is None else version for i, version in enumerate(known)]


def _scored(request: Request, role: str, scores_role: str) -> list[_Samples]:
    samples, scores = request.inputs.get(role, ()), request.inputs.get(scores_role, ())
    if scores and len(scores) != len(samples):
        raise ArtifactError(
            f"{len(samples)} {role} but {len(scores)} {scores_role}; each needs its own, in the same order"
        )
    return [_Samples.read(s, c) for s, c in zip(samples, scores or [None] * len(samples), strict=True)]


def _estimate(scores: Any) -> Estimate:
    """Over the finite scores: mean, and standard deviation (n - 1) over the root of n."""
    known = scores.dropna()
    return Estimate(float(known.mean()), float(known.std(ddof=1) / math.sqrt(max(1, len(known)))), len(known))


def _paired(found: _Inputs) -> Any:
    """Final minus base score of each held-out sample that has both."""
    return (found.evaluations[-1].table["score"] - found.evaluations[0].table["score"]).dropna()


def _summary(found: _Inputs) -> dict[str, Any]:
    ends = {"before": found.evaluations[:1], "after": found.evaluations[1:][-1:]}
    means = {name: e.estimate.mean for name, end in ends.items() for e in end if e.estimate.n}
    return {"iterations": len(found.updates) or len(found.rollouts), **means}


def _subtitle(found: _Inputs, reward: str) -> str:
    counts = {
        "iteration": len(found.updates) or len(found.rollouts),
        "training sample": sum(len(r.table) for r in found.rollouts),
        "held-out sample": len(found.evaluations[0].table) if found.evaluations else 0,
    }
    parts = [f"{n:,} {what}{'' if n == 1 else 's'}" for what, n in counts.items() if n]
    return " · ".join(([f"reward {reward}"] if reward else []) + parts)


def _headline(found: _Inputs, reward: str) -> str:
    """The held-out reward before and after, and the change sample by sample."""
    ends = [("before", found.evaluations[:1]), ("after", found.evaluations[1:][-1:])]
    boxes = [_box(name, e.estimate, number(e.estimate.mean)) for name, end in ends for e in end if e.estimate.n]
    if not boxes:
        return ""
    change = _estimate(_paired(found))
    if len(boxes) == 2 and change.n:
        boxes.append(_box("change, sample by sample", change, signed(change.mean), _direction(change.mean)))
    note = "Mean ± standard error, from the stock pipeline on fixed prompts and seeds that are never trained on."
    numbers = f'<div class="numbers">{"".join(boxes)}</div>'
    return report_html.section(f"Held-out {reward}", f'<p class="note">{note}</p>', numbers)


def _box(name: str, estimate: Estimate, mean: str, direction: str = "") -> str:
    shown, error = estimate.parts
    # The error decides the digits; the sign is the caller's.
    shown = f"+{shown}" if mean.startswith("+") else shown
    return (
        f'<div class="{direction}"><span>{text(name)}</span><b>{text(shown)}<i>{text(error)}</i></b>'
        f"<span>n = {estimate.n}</span></div>"
    )


def _curve(found: _Inputs, reward: str) -> str:
    """Training and held-out reward by policy version; the loss for runs without rewards."""
    training = [(float(r.iteration or 0), r.estimate) for r in found.rollouts]
    held_out = [(float(v), e.estimate) for v, e in zip(found.versions, found.evaluations, strict=True)]
    series = [
        Series("training, mean of each iteration ± 1 standard error", training, line=True),
        Series("held-out ± 1 standard error", held_out, line=False),
    ]
    figures = [report_html.curve(series, "policy version (iterations trained)", reward)]
    if not found.rollouts and found.updates:
        losses = pd.concat([read_table(u, METRICS) for u in found.updates], ignore_index=True)
        values = zip(losses["step"], losses["loss"], strict=True)
        points = [(float(step), Estimate(float(loss), math.nan, 1)) for step, loss in values]
        figures.append(report_html.curve([Series("loss", points, line=True)], "optimizer step", "loss"))
    titles = ("Reward", "Loss")
    shown = [report_html.section(title, f) for title, f in zip(titles, figures, strict=False) if f]
    return "\n".join(shown)


def _comparison(found: _Inputs) -> str:
    """The same held-out samples from the base and from the final policy."""
    if len(found.evaluations) < 2:
        return ""
    base, final = found.evaluations[0], found.evaluations[-1]
    common = [sample_id for sample_id in base.table.index if sample_id in final.table.index]
    shown = min(PAIRS_SHOWN, len(common))
    ids = [common[i * len(common) // shown] for i in range(shown)]
    before, after = base.load(ids), final.load(ids)
    cards = [_pair(base.table.loc[i], final.table.loc[i], before[i], after[i]) for i in ids]
    rise = _paired(found)
    counts = f"{int((rise > 0).sum())} of {len(rise)} scored samples got better, {int((rise < 0).sum())} worse. "
    note = f"{counts if len(rise) else ''}Shown: {len(ids)}, evenly spaced; same prompt, same seed."
    grid = f'<div class="cards">{"".join(cards)}</div>'
    return report_html.section("Base and final", f'<p class="note">{note}</p>', grid)


def _pair(base: Any, final: Any, before: StoredSample, after: StoredSample) -> str:
    rise = float(final["score"] - base["score"])
    change = f"{'▲' if rise > 0 else '▼'} {signed(rise)}" if rise else "unchanged"
    chip = f'<span class="chip">{change}</span>' if math.isfinite(rise) else ""
    film = " film" if report_html.is_film(before) else ""
    return (
        f'<div class="card {_direction(rise)}"><div class="pair{film}">'
        f"<div>{report_html.picture(before)}{_line('base', base)}</div>"
        f"<div>{report_html.picture(after)}{_line('final', final)}</div></div>"
        f'<p class="prompt">{text(before.row["prompt"])}</p>{chip}</div>\n'
    )


def _line(name: str, row: Any) -> str:
    if row["failed"]:
        return f'<div class="line"><span>{text(name)}</span></div>{_failure(row)}'
    score = "" if math.isnan(row["score"]) else f"<b>{number(row['score'])}</b>"
    return f'<div class="line"><span>{text(name)}</span>{score}</div>'


def _failure(row: Any) -> str:
    return f'<p class="failed">failed: {text(row["error"] or "no reason given")}</p>'


def _direction(rise: float) -> str:
    return "better" if rise > 0 else "worse" if rise < 0 else ""


def _iteration(rollout: _Samples, update: Any, groups_shown: int, is_open: bool) -> str:
    """One iteration, folded: its widest groups, and some of the samples that failed."""
    table = rollout.table
    advantages = pd.Series(dtype="float64") if update is None else update["advantage"]
    table = table.assign(advantage=advantages.reindex(table.index))
    scored = table[table["valid"]].groupby("prompt_id", sort=False)["score"]
    spreads = (scored.max() - scored.min()).sort_values(ascending=False, kind="stable").head(groups_shown)
    ends = {group: (scored.idxmax()[group], scored.idxmin()[group]) for group in spreads.index}
    failed = table.index[table["failed"]]
    stored = rollout.load(sorted({i for pair in ends.values() for i in pair} | set(failed[:FAILED_SHOWN])))
    groups = [_group(table, stored, ends[group], spreads[group]) for group in spreads.index]
    if len(failed):
        cards = "".join(_card("failed", table.loc[i], stored[i]) for i in failed[:FAILED_SHOWN])
        groups.append(f'<h3>Failed <span>{len(failed)} samples</span></h3><div class="cards">{cards}</div>')
    facts = [str(rollout.estimate)] if rollout.estimate.n else []
    facts += [f"{len(table)} samples"] + ([f"{len(failed)} failed"] if len(failed) else [])
    return (
        f"<details{' open' if is_open else ''}><summary><b>Iteration {rollout.iteration or 0}</b> "
        f"<span>{text(' · '.join(facts))}</span></summary>\n{''.join(groups)}</details>"
    )


def _group(table: Any, stored: dict[str, StoredSample], ends: tuple[str, str], spread: float) -> str:
    """Best and worst sample of one prompt; one card where they are the same sample."""
    best, worst = ends
    if best == worst:
        cards = _card("only", table.loc[best], stored[best])
    else:
        cards = _card("best", table.loc[best], stored[best]) + _card("worst", table.loc[worst], stored[worst])
    head = f"{text(table.loc[best, 'prompt'])} <span>spread {number(spread)}</span>"
    return f'<h3>{head}</h3><div class="cards">{cards}</div>\n'


def _card(name: str, row: Any, sample: StoredSample) -> str:
    kind = {"best": " better", "worst": " worse"}.get(name, "")
    if row["failed"]:
        words = f'{_failure(row)}<p class="prompt">{text(row["prompt"])}</p>'
    else:
        trained = math.isfinite(row["advantage"])
        advantage = f"advantage {signed(row['advantage'])}" if trained else "not trained on"
        reward = f'<div class="line"><span>reward</span><b>{number(row["score"])}</b></div>'
        words = f'<div class="line"><span>{name}</span><span>{advantage}</span></div>{reward}'
    return f'<div class="card{kind}">{report_html.picture(sample)}{words}</div>'


def _metrics(updates: list[Artifact]) -> str:
    """The last optimizer step of each iteration."""
    last = [(u.manifest.iteration, read_table(u, METRICS).iloc[-1]) for u in updates if u.names(METRICS)]
    if not last:
        return ""
    names = [name for name in METRICS_SHOWN if any(name in row for _, row in last)]
    rows = [
        [_or_dash(iteration), number(row.get("step")), *(number(row.get(name)) for name in names)]
        for iteration, row in last
    ]
    header = ["iteration", "optimizer step", *(name.replace("_", " ") for name in names)]
    note = '<p class="note">Of the last optimizer step of each iteration.</p>'
    return report_html.section("Optimizer", note, report_html.table(header, rows))


def _provenance(found: _Inputs) -> str:
    """What this page was made of."""
    artifacts = [*found.updates]
    for samples in (*found.rollouts, *found.evaluations):
        artifacts += [samples.artifact] + ([samples.scores] if samples.scores else [])
    if not artifacts:
        return ""
    order = list(contracts.STAGES)
    artifacts.sort(
        key=lambda a: (-1 if a.manifest.iteration is None else a.manifest.iteration, order.index(a.manifest.stage))
    )
    rows = [[a.manifest.stage, _or_dash(a.manifest.iteration), a.manifest.content[:12], _policy(a)] for a in artifacts]
    table = report_html.table(["stage", "iteration", "content", "policy"], rows)
    note = '<p class="note">Digests of the bytes. Policy: the weights made (update) or used (others).</p>'
    return report_html.section("Made from", note, f'<div class="names">{table}</div>')


def _policy(artifact: Artifact) -> str:
    """The policy parts that the artifact holds, or the policy or export that it was made with."""
    manifest = artifact.manifest
    parts = [part for part in (CURRENT, OLD, EMA) if manifest.has_part(part)]
    if parts:
        return ", ".join(f"{part} {manifest.part_content(part)[:12]}" for part in parts)
    sources = [
        (", ".join(i.parts) or role, i.content) for role in ("policy", "export") for i in manifest.inputs.get(role, ())
    ]
    return ", ".join(f"{name} {content[:12]}" for name, content in sources) or "–"


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)
