"""The page about a run: how the reward went, what trained it, base beside final. One file, nothing from elsewhere."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from stages import contracts
from stages.artifacts import Artifact
from stages.contracts import Input, Request
from stages.report_html import Picture, comparison, curve, group, page, provenance, table
from stages.reward import SCORES
from stages.runner import Context
from stages.samples import INDEX, StoredSample, read_shard, read_table, shard_name

SHOWN_PAIRS = 24
"""Base and final pictures side by side."""
ADVANTAGES, METRICS = "advantages.parquet", "metrics.parquet"


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``index.html``."""
    config = request.config
    assert isinstance(config, contracts.Report)
    inputs = {role: [_Scored(source) for source in request.inputs.get(role, ())] for role in config.inputs}
    for role, scores in (("rollouts", "scores"), ("evaluations", "evaluation_scores")):
        for samples, scored in zip(inputs[role], inputs[scores], strict=False):
            samples.scores_of(scored.artifact)
    total = len(inputs["rollouts"]) + 3
    context.progress("reporting", 0, total)
    parts = [_headline(inputs["evaluations"]), _curves(inputs), _pairs(inputs["evaluations"])]
    for done, (rollout, update) in enumerate(zip(inputs["rollouts"], inputs["updates"], strict=False)):
        context.progress("reporting", done + 1, total)
        parts.append(_iteration(rollout, update.artifact, config.groups_shown))
    parts.append(_metrics(inputs["updates"]))
    parts.append(provenance([s.artifact.manifest for artifacts in inputs.values() for s in artifacts]))
    context.attempt.put("index.html", page(config.title, parts).encode())
    context.progress("reporting", total, total)
    return {}


@dataclass
class _Scored:
    """A samples artifact with its scores, read as far as needed."""

    source: Input
    scores: pd.DataFrame | None = None

    @cached_property
    def artifact(self) -> Artifact:
        return Artifact(self.source)

    def scores_of(self, artifact: Artifact) -> None:
        """Take the scores of an artifact of the reward stage."""
        self.scores = read_table(artifact, SCORES)

    @cached_property
    def index(self) -> pd.DataFrame:
        """The samples with their scores."""
        samples = read_table(self.artifact, INDEX)
        if self.scores is None:
            return samples.assign(score=float("nan"), valid=False, error="not scored")
        return samples.merge(self.scores[["sample_id", "score", "valid", "error"]], on="sample_id", how="left")

    @property
    def mean_and_error(self) -> tuple[float, float, int]:
        """Mean score, its standard error, and how many samples were scored."""
        scores = self.index.loc[self.index["valid"], "score"].astype("float64")
        return float(scores.mean()), float(scores.std(ddof=1) / len(scores) ** 0.5), len(scores)

    def pictures(self, ids: list[str]) -> dict[str, StoredSample]:
        """The named samples, reading the shards that hold them and no others."""
        shards = sorted(set(self.index.loc[self.index["sample_id"].isin(ids), "shard"]))
        found = (s for shard in shards for s in read_shard(self.artifact, shard_name(int(shard))))
        return {s.sample_id: s for s in found if s.sample_id in ids}


def _headline(evaluations: list[_Scored]) -> str:
    scored = [e for e in evaluations if e.scores is not None]
    if len(scored) < 2:
        return ""
    (before, before_error, n), (after, after_error, _) = scored[0].mean_and_error, scored[-1].mean_and_error
    both = scored[0].index.merge(scored[-1].index, on="sample_id", suffixes=("_before", "_after"))
    both = both[both["valid_before"] & both["valid_after"]]
    change = np.asarray(both["score_after"], np.float64) - np.asarray(both["score_before"], np.float64)
    paired = f"{change.mean():+.3f} ± {change.std(ddof=1) / len(change) ** 0.5:.3f}"
    return (
        f'<p class="headline">{before:.3f} <small>± {before_error:.3f}</small> → {after:.3f} '
        f"<small>± {after_error:.3f}</small></p><p>Held-out reward of the base and the final policy, {n} samples each, "
        "by the stock pipeline from the exported weights (± one standard error). "
        f"Change, sample by sample: {paired}.</p>"
    )


def _curves(inputs: dict[str, list[_Scored]]) -> str:
    training = [(k + 0.5, *s.mean_and_error[:2]) for k, s in enumerate(inputs["rollouts"]) if s.scores is not None]
    held_out = [(_version(e), *e.mean_and_error[:2]) for e in inputs["evaluations"] if e.scores is not None]
    return curve("Reward", {"rollouts": training, "held out": held_out}) if training or held_out else ""


def _version(evaluation: _Scored) -> float:
    """The policy version that an evaluation sampled: its slot is ``exports/<version>/evaluate``."""
    return float(evaluation.source.url.rsplit("/", 2)[1])


def _pairs(evaluations: list[_Scored]) -> str:
    if len(evaluations) < 2:
        return ""
    first, last = evaluations[0], evaluations[-1]
    ids = first.index["sample_id"].tolist()
    shown = ids[:: max(len(ids) // SHOWN_PAIRS, 1)][:SHOWN_PAIRS]
    scores = [dict(zip(e.index["sample_id"], e.index["score"], strict=True)) for e in (first, last)]
    pictures = [e.pictures(shown) for e in (first, last)]
    both = [i for i in shown if i in pictures[0] and i in pictures[1]]
    return comparison([tuple(_picture(pictures[side][i], scores[side][i]) for side in (0, 1)) for i in both])


def _picture(stored: StoredSample, score: float, note: str = "") -> Picture:
    return Picture(stored.pixels, stored.about["prompt"], None if pd.isna(score) else float(score), note)


def _iteration(rollout: _Scored, update: Artifact, groups_shown: int) -> str:
    """Best and worst sample of the groups whose rewards differ most."""
    rows = rollout.index
    if update.names(ADVANTAGES):
        rows = rows.merge(read_table(update, ADVANTAGES)[["sample_id", "advantage"]], on="sample_id", how="left")
    else:
        rows = rows.assign(advantage=float("nan"))
    spread = rows[rows["valid"]].groupby("prompt_id")["score"].agg(lambda s: s.max() - s.min()).to_dict()
    chosen = sorted(spread, key=lambda prompt_id: (-spread[prompt_id], prompt_id))[:groups_shown]
    groups = []
    for prompt_id in chosen:
        members = pd.DataFrame(rows[(rows["prompt_id"] == prompt_id) & rows["valid"]]).to_dict("records")
        ordered = sorted(members, key=lambda row: (row["score"], row["sample_id"]))
        ends = [ordered[-1], ordered[0]]
        pictures = rollout.pictures([row["sample_id"] for row in ends])
        shown = [_picture(pictures[r["sample_id"]], r["score"], _advantage(r["advantage"])) for r in ends]
        groups.append(group(ends[0]["prompt"], shown))
    mean, error, count = rollout.mean_and_error
    failed = rows.loc[~rows["valid"], ["sample_id", "error"]]
    words = [f"{row['sample_id']} failed: {row['error']}" for _, row in failed.iterrows()]
    title = f"Iteration {rollout.artifact.manifest.iteration}: reward {mean:.3f} ± {error:.3f}, {count} samples"
    return table(title, groups, words)


def _advantage(value: float) -> str:
    return "excluded" if pd.isna(value) else f"advantage {value:+.2f}"


def _metrics(updates: list[_Scored]) -> str:
    frames = [read_table(u.artifact, METRICS) for u in updates if u.artifact.names(METRICS)]
    if not frames:
        return ""
    steps = pd.concat(frames, ignore_index=True)
    names = [name for name in ("loss", "grad_norm", "old_deviation", "kl", "velocity_error") if name in steps]
    points = {
        name: [(float(s), float(v), 0.0) for s, v in zip(steps["step"], steps[name], strict=True)] for name in names
    }
    return "".join(curve(f"{name} by optimizer step", {name: values}) for name, values in points.items())
