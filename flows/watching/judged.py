"""The last lines of a run: measurements on held-out data before and after training, from the newest manifests."""

from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_rl_core.errors import counted
from flows.library.best import Best, judged
from flows.planning.base import AnyRun
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of
from stages.scoring.summaries import known_error

LOSS = "held-out loss"
"""Value of :attr:`Best.by` if a loss ranks policies."""


def held_out_lines(run: AnyRun) -> list[str]:
    """Return a line for every held-out reward of the base and the final policy; last, for the number that ranks them.

    A reward without scores of both policies has no line. Standard errors are over prompts.
    """
    lines: list[str] = []
    for label, scores in _held_out_scores(run):
        errors = [known_error(score) for score in scores]
        means = [_mean_of(score, label, error) for score, error in zip(scores, errors, strict=True)]
        count = f"{scores[1].summary['scored']} held-out samples each"
        over = "" if errors == [None, None] else ", errors over prompts"
        lines.append(f"{label}: {means[0]} before, {means[1]} after, {count}{over}")
    if (ends := _ends(run)) is not None:
        before, after = ends
        counting = ""
        if before.passed is not None and after.passed is not None:
            counting = f", over {before.passed[0]} and {after.passed[0]} of {after.passed[1]} samples that count"
        lines.append(f"{after.by}: {before.figure:.3f} -> {after.figure:.3f}{counting}")
    return lines


def held_out_numbers(run: AnyRun) -> dict[str, tuple[float, float]]:
    """Return by name the values before and after: first of the number that ranks policies, then of rewards and loss."""
    found: dict[str, tuple[Any, ...]] = {}
    if (ends := _ends(run)) is not None:
        found[ends[0].by] = tuple(end.figure for end in ends)
    for label, scores in _held_out_scores(run):
        found.setdefault(f"held-out {label}", tuple(score.summary[label] for score in scores))
    losses = tuple(manifest.summary["loss"] for manifest in _made(run, "validate"))
    if losses and None not in losses:
        found.setdefault(LOSS, losses)
    return {by if by == LOSS else by.removeprefix("held-out "): (ends[0], ends[1]) for by, ends in found.items()}


def result_line(run: AnyRun, numbers: Mapping[str, tuple[float, float]]) -> str:
    """Return the numbers in a line, such as ``ocr 0.615 -> 0.786``; without any, the number of iterations."""
    changes = [f"{by} {before:.3f} -> {after:.3f}" for by, (before, after) in numbers.items()]
    return ", ".join(changes) or f"{counted(run.recipe.train.num_iterations, 'iteration')}, nothing held out"


def _mean_of(scores: Manifest, label: str, error: float | None) -> str:
    return f"{scores.summary[label]:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _ends(run: AnyRun) -> tuple[Best, Best] | None:
    """Return the numbers that rank the base policy and the final one; None unless both exist."""
    before, after = (judged(run, k) for k in (0, run.recipe.train.num_iterations))
    return None if before is None or after is None else (before, after)


def _held_out_scores(run: AnyRun) -> Iterator[tuple[str, list[Manifest]]]:
    """Yield each reward with its held-out scores of the base policy and of the final one, if both have a mean."""
    for reward in run.recipe.rewards:
        label = reward.fn.label
        scores = _made(run, f"evaluate-{label}")
        if scores and all(isinstance(score.summary.get(label), float) for score in scores):
            yield label, scores


def _made(run: AnyRun, stage: str) -> list[Manifest]:
    """Return a judging stage's manifests for the base and the final policy; empty unless both exist."""
    slots = (run.slots.version(k, stage) for k in (0, run.recipe.train.num_iterations))
    found = [manifest for slot in slots if (manifest := current_of(slot)[1]) is not None]
    return found if len(found) == 2 else []
