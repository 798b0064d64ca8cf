"""Rewards, losses and answers of two runs. Measurements on the same prompts, media or conversations are paired."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from cosmos_rl_core.estimates.estimate import Estimate, Sums
from flows.comparing.side import Side, shared
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_of, input_of
from stages.scoring import held_out
from stages.scoring.score_tables import scored_numbers

SAME_SAMPLES, SAME_PROMPTS, OTHER_PROMPTS = "sample by sample", "prompt by prompt, other seeds", "other prompts"


@dataclass(frozen=True)
class Difference:
    """A mean in both runs, and the difference B - A."""

    name: str
    where: str
    """Place of the mean, such as ``held-out, policy 6`` or ``training, iteration 5``."""
    a: Estimate
    b: Estimate
    change: Estimate
    how: str
    """How both sides are paired. Differences between paired prompts or items are not in the error of the difference."""

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
    """Return the difference over the samples that both runs scored; over all samples of each if they share none."""
    columns = [label, "noise_seed"]
    both = a[columns].merge(b[columns], on="sample_id", suffixes=(".a", ".b")).dropna()
    how = SAME_SAMPLES if both["noise_seed.a"].eq(both["noise_seed.b"]).all() else SAME_PROMPTS
    sides = (a, b) if both.empty else (a.loc[both.index], b.loc[both.index])
    sums = [Sums.of(side[label], side["prompt_id"]) for side in sides]
    return Difference.of(label, where, sums, OTHER_PROMPTS if both.empty else how)


def _losses(a: Side, b: Side) -> Iterator[Difference]:
    """Yield differences on held-out media or conversations, at the newest policy that both runs judged."""
    sides = [_validated(one) for one in (a, b)]
    if not (both := sides[0].keys() & sides[1].keys()):
        return
    version = max(both)
    one, other = (side[version] for side in sides)
    reader = held_out.reader_of(one.manifest.stage) if one.manifest.stage == other.manifest.stage else None
    for found in () if reader is None else reader.compared(one, other):
        yield Difference.of(f"val/{found.name}", f"held-out, policy {version}", found.sums, found.how)


def _validated(side: Side) -> dict[int, Artifact]:
    """Return the held-out losses of a run by policy version."""
    slots = {k: side.run.slots.version(k, "validate") for k in side.collected.judged}
    return {k: Artifact(input_of(slot)) for k, slot in slots.items() if current_of(slot)[1] is not None}


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
    made = {label: slot for label, slot in slots.items() if current_of(slot)[1] is not None}
    return {label: scored_numbers(label, Artifact(input_of(slot))) for label, slot in made.items()}
