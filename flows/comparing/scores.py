"""Rewards, losses and answers of two runs. What both measured on the same prompts, media or conversations is paired."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from cosmos_rl_core.estimates.estimate import Estimate, Sums
from flows.comparing.side import Side, shared
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of, standing
from stages.formats.losses import item_losses, sums_of
from stages.scoring.spreads import scored_numbers
from stages.vlm.contracts import VlmEvaluate
from stages.vlm.evaluated import answer_table, asked_of, correct_sums, loss_sums

PAIRED, APART = "item by item", "other items"
SAME_SAMPLES, SAME_PROMPTS, OTHER_PROMPTS = "sample by sample", "prompt by prompt, other seeds", "other prompts"


@dataclass(frozen=True)
class Difference:
    """A mean in both runs, and the difference B - A."""

    name: str
    where: str
    """Such as ``held-out, policy 6`` or ``training, iteration 5``."""
    a: Estimate
    b: Estimate
    change: Estimate
    how: str
    """What both sides share, by which the error of the difference leaves out how prompts or items differ."""

    @classmethod
    def of(cls, name: str, where: str, sums: Sequence[Sums], how: str) -> Self:
        """Return the difference of the means of A and B, paired by the clusters that both have."""
        a, b = sums
        return cls(name, where, a.estimate, b.estimate, a.change_to(b), how)


def differences(a: Side, b: Side) -> list[Difference]:
    """Return the difference of every reward and held-out number, at the newest place that both runs have."""
    return [*_rewards(a, b), *_losses(a, b), *_training(a, b)]


def _rewards(a: Side, b: Side) -> Iterator[Difference]:
    """Yield the held-out rewards of the newest policy version that both runs judged, sample by sample."""
    judged = shared(a.collected.judged, b.collected.judged)
    if not judged or not a.run.evaluates or not b.run.evaluates:
        return
    version = max(judged)
    tables = [one.opened.held_out(version).set_index("sample_id") for one in (a, b)]
    labels = [reward.fn.label for reward in a.plan.recipe.rewards]
    for label in labels:
        if all(label in table for table in tables):
            yield _of_samples(label, f"held-out, policy {version}", *tables)


def _of_samples(label: str, where: str, a: Any, b: Any) -> Difference:
    """Return the difference over the samples that both scored; over all of each if they share none."""
    columns = [label, "noise_seed"]
    both = a[columns].merge(b[columns], on="sample_id", suffixes=(".a", ".b")).dropna()
    how = SAME_SAMPLES if both["noise_seed.a"].eq(both["noise_seed.b"]).all() else SAME_PROMPTS
    sides = (a, b) if both.empty else (a.loc[both.index], b.loc[both.index])
    sums = [Sums.of(side[label], side["prompt_id"]) for side in sides]
    return Difference.of(label, where, sums, OTHER_PROMPTS if both.empty else how)


def _losses(a: Side, b: Side) -> Iterator[Difference]:
    """Yield what was measured on held-out media or conversations, at the newest policy that both runs judged."""
    found = [_validated(one) for one in (a, b)]
    if not (both := found[0].keys() & found[1].keys()):
        return
    version = max(both)
    one, other = (side[version] for side in found)
    if one.manifest.stage == other.manifest.stage:
        compared = _of_answers if one.manifest.stage == VlmEvaluate.name else _of_items
        yield from compared(one, other, f"held-out, policy {version}")


def _validated(side: Side) -> dict[int, Artifact]:
    """Return the held-out losses of a run by policy version."""
    slots = {k: side.run.slots.version(k, "validate") for k in side.collected.judged}
    return {k: Artifact(input_of(slot)) for k, slot in slots.items() if standing(slot)[1] is not None}


def _of_items(a: Artifact, b: Artifact, where: str) -> Iterator[Difference]:
    tables = [item_losses(one) for one in (a, b)]
    shared_items = tables[0].index.intersection(tables[1].index)
    if not shared_items.empty:
        tables = [table.loc[shared_items] for table in tables]
    sums = [sums_of(table) for table in tables]
    if all(math.isfinite(one.estimate.mean) for one in sums):
        same_noise = a.manifest.seed == b.manifest.seed and _levels(a) == _levels(b)
        how = (PAIRED if same_noise else f"{PAIRED}, other noise") if not shared_items.empty else APART
        yield Difference.of("val/avg_loss", where, sums, how)


def _levels(validated: Artifact) -> Any:
    return validated.manifest.config.get("num_levels")


def _of_answers(a: Artifact, b: Artifact, where: str) -> Iterator[Difference]:
    tables = [_named(one) for one in (a, b)]
    same = tables[0].index.intersection(tables[1].index)
    if not same.empty:
        tables = [table.loc[same] for table in tables]
    how = APART if same.empty else "conversation by conversation"
    yield from _if_known("val/avg_loss", where, loss_sums, tables, how)
    asked = [asked_of(table) for table in tables]
    for source in sorted({*asked[0]["source"]} & {*asked[1]["source"]}):
        rows = [table[table["source"] == source] for table in asked]
        yield from _if_known(f"val/correct_{source}", where, correct_sums, rows, how)


def _named(answers: Artifact) -> Any:
    """Return answers by dataset and id of the conversation: its number is that of one dataset of tokens."""
    table = answer_table(answers)
    return table.assign(number=table["source"] + "/" + table["id"]).set_index("number", drop=False)


def _if_known(
    name: str, where: str, sums_in: Callable[[Any], Sums], tables: list[Any], how: str
) -> Iterator[Difference]:
    sums = [sums_in(table) for table in tables]
    if all(math.isfinite(one.estimate.mean) for one in sums):
        yield Difference.of(name, where, sums, how)


def _training(a: Side, b: Side) -> Iterator[Difference]:
    """Yield the rewards of the newest rollout of both runs, prompt by prompt: runs of one seed draw the same ones."""
    both = shared(a.collected.iterations, b.collected.iterations)
    if not both:
        return
    k = max(both)
    tables = [_scores(side, k) for side in (a, b)]
    for label in (name for name in tables[0] if name in tables[1]):
        one, other = (side[label] for side in tables)
        for score in (label, *sorted({*one} & {*other} - {label, "prompt_id"})):
            sums = [Sums.of(table[score], table["prompt_id"]) for table in (one, other)]
            if sums[0].n and sums[1].n:
                same = {*one["prompt_id"]} & {*other["prompt_id"]}
                name = label if score == label else f"{label}: {score}"
                how = "prompt by prompt" if same else OTHER_PROMPTS
                yield Difference.of(name, f"training, iteration {k}", sums, how)


def _scores(side: Side, k: int) -> dict[str, Any]:
    """Return the numbers of every reward of a rollout by its label."""
    slots = {reward: side.run.slots.iteration(k, f"reward-{reward}") for reward in side.opened.rewards}
    made = {label: slot for label, slot in slots.items() if standing(slot)[1] is not None}
    return {label: scored_numbers(label, Artifact(input_of(slot))) for label, slot in made.items()}
