"""Numbers and pictures of one iteration or of one judged policy version, for the report.

It holds no time, host or path, so equal inputs give equal bytes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pandas as pd
from PIL import Image

from cosmos_rl_core.errors import first_line
from cosmos_rl_core.estimates.estimate import Sums
from cosmos_rl_core.rewards._base.answers import finite
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.contracts import Warn
from stages.execution.context import Context, Ranks
from stages.formats.losses import item_losses, sums_of
from stages.formats.samples import BY_GUARDRAIL, REFUSED, undecoded
from stages.formats.tables import read_table
from stages.reporting import choosing, pictures
from stages.reporting.contracts import WEIGHTED, Fragment
from stages.reporting.excerpt import (
    HELD_OUT_LOSS,
    Change,
    Excerpt,
    Failure,
    Loss,
    Picture,
    PromptScore,
    Score,
    Tripped,
)
from stages.reporting.numbers import words
from stages.reporting.samples import Samples
from stages.scoring.score_tables import scored_numbers

MOST_BYTES = 1_000_000
"""Most bytes of ``fragment.json``, which holds numbers and small pictures."""
PICTURE_BYTES = 640_000
"""Most bytes of all small pictures together, as data URLs, whose characters are one byte each."""
TOO_LARGE = "no small picture: it would be too large for this page"
"""Why a picture is left out that only has its full size."""
PROMPTS, REASONS = 500, 12
"""Most prompts with a mean of their own (the first ones), and most reasons of failures (the most frequent ones)."""
TEXT, SHORT, REASON = 300, 120, 200
"""Most characters of the prompt of a picture, of a prompt in a table, and of a reason."""


Put = Callable[[str, bytes], None]
"""Function that writes a file, given its name and its bytes."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Scored:
    """Samples with all scores."""

    samples: Samples
    artifacts: dict[str, Artifact]
    """The scores of each reward, by its label."""
    tables: dict[str, Any]
    """The scores as numbers, by the reward's label, and the weighted sum of rewards if they have weights."""

    @classmethod
    def read(cls, request: Request, role: str, scores_role: str) -> "Scored | None":
        """Read the samples of a role with their scores; None if there are none."""
        config = request.settings(Fragment)
        if not (sources := request.inputs.get(role, ())):
            return None
        scores = dict(zip(config.rewards, request.inputs.get(scores_role, ()), strict=True))
        samples = Samples.read(sources[0], scores.get(config.headline))
        artifacts = {label: Artifact(source) for label, source in scores.items()}
        tables = {label: scored_numbers(label, one) for label, one in artifacts.items()}
        if config.weights:
            tables[WEIGHTED] = _weighted(tables, config)
        return cls(samples, artifacts, tables)


def run(request: Request, context: Context[Ranks]) -> dict[str, Any]:
    """Write ``fragment.json`` and the full pictures. Return how many pictures there are, and failures if any."""
    excerpt = _fitted(excerpt_of(request, context.attempt.put, context.progress))
    data = excerpt.encode()
    assert len(data) <= MOST_BYTES, "texts are bounded"
    context.attempt.put(Fragment.FRAGMENT, data)
    failed = sum(one.count for one in excerpt.failures)
    return {"pictures": len(excerpt.pictures) + len(excerpt.first)} | ({"failed": failed} if failed else {})


def _fitted(excerpt: Excerpt) -> Excerpt:
    """Return the excerpt without its largest small pictures if it would have more than ``MOST_BYTES`` with them.

    The smallest pictures keep every pixel, so videos of noise may need more bytes than ``PICTURE_BYTES``.
    """
    surplus = len(excerpt.encode()) - MOST_BYTES
    found = {"pictures": dict(excerpt.pictures), "first": dict(excerpt.first)}
    shown = [(len(one.thumb), field, sample) for field, some in found.items() for sample, one in some.items()]
    for size, field, sample in sorted(shown, reverse=True):
        if surplus <= 0:
            break
        found[field][sample] = found[field][sample].model_copy(update={"thumb": "", "missing": TOO_LARGE})
        surplus -= size - len(TOO_LARGE)
    return excerpt.model_copy(update=found)


def excerpt_of(request: Request, put: Put, progress: Progress) -> Excerpt:
    """Return the excerpt that a report shows, and write the full pictures with ``put``."""
    excerpt, sources = _without_pictures(request)
    return excerpt.model_copy(update=_Pictures(put, progress, sources).made(excerpt))


def without_pictures(request: Request) -> Excerpt:
    """Return the numbers and texts of an excerpt, without its pictures. Reads no media."""
    return _without_pictures(request)[0]


def _without_pictures(request: Request) -> tuple[Excerpt, dict[str, Scored]]:
    """Return an excerpt without pictures, and the samples that give the pictures, by the excerpt's field to fill."""
    config = request.settings(Fragment)
    scored = Scored.read(request, "samples", "scores")
    first = Scored.read(request, "first", "first_scores")
    warnings = [Artifact(source).json(Warn.EVIDENCE) for source in request.inputs.get("warnings", ())]
    tripped = [row for evidence in warnings for row in _tripped(evidence)]
    losses, first_losses = (_losses(request, role) for role in ("validations", "first_validations"))
    excerpt = Excerpt(
        k=request.iteration or 0,
        tripped=tuple(tripped),
        undecided=sum(len(evidence.get("undecided", ())) for evidence in warnings),
        loss=None if losses is None else Loss.of(sums_of(losses).estimate),
        changes=tuple(_changes(scored, first, losses, first_losses)),
    )
    if scored is None:
        return excerpt, {}
    table, before = scored.samples.table, None if first is None else first.samples.table
    ids = tuple(dict.fromkeys(one for limit in tripped for one in limit.samples))
    if config.held_out:
        shown = choosing.of_judged(table, before)
    else:
        shown = choosing.of_rollout(table[~undecoded(table)]) | {"tripped": ids}
    chosen = dict.fromkeys(chain.from_iterable(shown.values()))
    facts = {"pictures": {one: _facts(scored, one) for one in chosen}}
    if first is not None:
        facts["first"] = {one: _facts(first, one) for one in (*shown["improved"], *shown["worsened"])}
    numbers = _numbers(scored, config) | {"shown": {why: ids for why, ids in shown.items() if ids}}
    return excerpt.model_copy(update=numbers | facts), {"pictures": scored} | ({"first": first} if first else {})


def _numbers(scored: Scored, config: Fragment) -> dict[str, Any]:
    """Return the numbers of an excerpt by name."""
    table = scored.samples.table
    groups = table.dropna(subset=["score"]).groupby("prompt_id", sort=False)
    means, spread = groups["score"].mean(), groups["score"].max() - groups["score"].min()
    texts = groups["prompt"].first()
    counts = groups["score"].count()
    by_prompt = (
        PromptScore(prompt_id=str(one), prompt=texts[one][:SHORT], mean=float(means[one]), n=int(counts[one]))
        for one in means.index[:PROMPTS]
    )
    return {
        "samples": len(table),
        "prompts": int(table["prompt_id"].nunique()),
        "scored": int(table["score"].notna().sum()),
        "alike": int(((spread == 0) & (counts > 1)).sum()),
        "scores": tuple(chain.from_iterable(_scores(label, one) for label, one in scored.tables.items())),
        "by_prompt": tuple(by_prompt),
        "failures": tuple(_failures(scored, config)),
    }


def _scores(label: str, table: Any) -> Iterator[Score]:
    """Yield each score that a reward gave, first the score with the reward's own name."""
    for name in (label, *sorted({*table.columns} - {label, "prompt_id"})):
        known = table[name].dropna()
        yield Score.of(label, name, known, table["prompt_id"].reindex(known.index))


def _weighted(tables: Mapping[str, Any], config: Fragment) -> Any:
    """Return the weighted sum of rewards of the samples that have all of their scores and pass every gate."""
    labels = sorted({*config.weights, *config.gates})
    scores: Any = pd.DataFrame({label: tables[label][label] for label in labels}).dropna()
    for label, gate in config.gates.items():
        scores = scores.loc[[gate.why_not(score) is None for score in scores[label]]]
    total = sum(weight * scores[label] for label, weight in sorted(config.weights.items()))
    return pd.DataFrame({WEIGHTED: total, "prompt_id": tables[labels[0]]["prompt_id"].reindex(scores.index)})


def _failures(scored: Scored, config: Fragment) -> Iterator[Failure]:
    """Yield the reasons why samples have no score or do not count, the most frequent first."""
    table = scored.samples.table
    refused = table[REFUSED].dropna() if REFUSED in table else pd.Series(dtype=object)
    if broken := int((~table["finite"].astype(bool)).sum()) - len(refused):
        yield Failure(what="not finite", reward="", reason="the sampler gave NaN or infinity", count=broken)
    for reason, count in refused.value_counts().items():
        yield Failure(what="refused", reward="", reason=str(reason), count=int(count))
    for label, artifact in scored.artifacts.items():
        rows = read_table(artifact, contracts.Reward.SCORES)
        answers = read_table(artifact, contracts.Reward.ANSWERS).set_index("sample_id")["error"]
        errors: Any = answers.reindex(rows.loc[~rows["valid"], "sample_id"]).fillna("")
        errors = errors.where(~errors.index.isin(refused.index), BY_GUARDRAIL)
        told = errors.map(lambda error: first_line(error)[:REASON] or "no reason given")
        for reason, count in told.value_counts(sort=True).head(REASONS).items():
            yield Failure(what="no score", reward=label, reason=str(reason), count=int(count))
    # For held-out samples, gates only say which samples count in the sum.
    for label, gate in config.gates.items() if not config.held_out else ():
        why = [gate.why_not(score) for score in scored.tables[label][label]]
        if held := sum(one is not None for one in why):
            bounds = [
                f"{name} {bound:g}" for name, bound in (("min", gate.min), ("max", gate.max)) if bound is not None
            ]
            reason = f"beyond {', '.join(bounds)}: {gate.on_fail}"
            yield Failure(what="gated", reward=label, reason=reason, count=held)


def _tripped(evidence: Mapping[str, Any]) -> Iterator[Tripped]:
    for row in evidence["tripped"]:
        ids = tuple(sample for sample, _ in row["samples"][: choosing.TRIPPED])
        yield Tripped(words=words(row), reward=row["reward"], score=row["score"], samples=ids)


class _Pictures:
    """Pictures of samples. Samples are read one after the other, because videos are large."""

    def __init__(self, put: Put, progress: Progress, sources: Mapping[str, Scored]) -> None:
        self._put, self._progress, self._sources = put, progress, sources
        self._facts: dict[tuple[str, str], Picture] = {}
        self._strips: dict[tuple[str, str], list[Image.Image]] = {}

    def made(self, excerpt: Excerpt) -> dict[str, dict[str, Picture]]:
        """Return small pictures by field and sample, within ``PICTURE_BYTES`` together, and write the full ones."""
        for field, scored in self._sources.items():
            self._read(field, scored, getattr(excerpt, field))
        thumbs = pictures.within({"/".join(key): frames for key, frames in self._strips.items()}, PICTURE_BYTES)
        found: dict[str, dict[str, Picture]] = {"pictures": {}, "first": {}}
        for (field, sample), facts in self._facts.items():
            if (small := thumbs.get(f"{field}/{sample}")) is not None:
                facts = facts.model_copy(update={"thumb": small.source, "width": small.width, "height": small.height})
            found[field][sample] = facts
        return found

    def _read(self, field: str, scored: Scored, shown: Mapping[str, Picture]) -> None:
        """Read samples, write their full pictures, and keep small ones."""
        for number, sample in enumerate(scored.samples.load(shown)):
            self._progress(field, number, len(shown))
            facts = shown[sample.sample_id].model_copy(update={"missing": pictures.missing(sample)})
            if not facts.missing:
                ending, data = pictures.full(sample)
                name = f"{Fragment.FULL}/{'first-' if field == 'first' else ''}{sample.sample_id}.{ending}"
                self._put(name, data)
                self._strips[field, sample.sample_id] = pictures.strip(sample)
                facts = facts.model_copy(update={"full": name})
            self._facts[field, sample.sample_id] = facts


def _facts(scored: Scored, sample: str) -> Picture:
    """Return the facts of a sample (prompt, seed, scores, error) without its picture."""
    row = scored.samples.table.loc[sample]
    others: dict[str, float] = {}
    for label, table in scored.tables.items():
        if sample in table.index and (score := finite(table.at[sample, label])) is not None:
            others[label] = score
    return Picture(
        sample=sample,
        prompt=row["prompt"][:TEXT],
        seed=int(row["seed"]),
        score=finite(row["score"]),
        others=others,
        error=first_line(row["error"])[:REASON] if row["failed"] else "",
        references=tuple(row.get("references", ())),
    )


def _losses(request: Request, role: str) -> Any | None:
    """Return the held-out loss of each item with its medium; None if none was measured."""
    sources = request.inputs.get(role, ())
    return item_losses(Artifact(sources[0])) if sources else None


def _changes(
    scored: Scored | None, first: Scored | None, losses: Any | None, first_losses: Any | None
) -> Iterator[Change]:
    """Yield the change of each reward and of the held-out loss since version 0."""
    if scored is not None and first is not None:
        for label, table in scored.tables.items():
            before, after = (Sums.of(one[label], one["prompt_id"]) for one in (first.tables[label], table))
            yield Change.of_both(label, before.change_to(after), table[label] - first.tables[label][label])
    if losses is not None and first_losses is not None:
        change = sums_of(first_losses).change_to(sums_of(losses))
        yield Change.of_both(HELD_OUT_LOSS, change, losses["loss"] - first_losses["loss"])
