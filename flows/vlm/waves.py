"""The list of waves of a run that fine-tunes a VLM."""

from collections.abc import Callable, Iterator
from functools import partial

from flows.planning.steps import Step, Wave
from flows.vlm import requests
from flows.vlm.run import VlmRun
from stages.artifacts.request import Request

Selection = Callable[[int], bool]


def vlm_sft(run: VlmRun, exported: Selection | None = None, judged: Selection | None = None) -> Iterator[Wave]:
    """Yield the waves of a run, in order. ``exported`` and ``judged`` choose policy versions, else the recipe."""
    slots, num_iterations = run.slots, run.recipe.train.num_iterations
    if run.plan.first == 0:
        yield Wave(Step("policy", "vlm_policy", slots.policy(0), partial(requests.policy, run)))
    yield from _data(run)
    for k in range(run.plan.first, num_iterations + 1):
        if k > run.plan.first:
            yield Wave(
                _step(
                    f"iteration-{k - 1:04d}",
                    "finetune",
                    slots.iteration(k - 1, "finetune"),
                    requests.finetune,
                    run,
                    k - 1,
                )
            )
        if (exported or run.exports)(k):
            yield Wave(_step(f"policy-{k:04d}", "export", slots.version(k, "export"), requests.export, run, k))
        if run.validates and (judged or run.is_due)(k):
            yield Wave(_step(f"policy-{k:04d}", "validate", slots.version(k, "validate"), requests.validate, run, k))
    yield Wave(Step("report", "report", slots.report, partial(requests.report, run, num_iterations)))


KINDS = {"finetune": "vlm_finetune", "export": "vlm_export", "validate": "vlm_evaluate"}
"""The stage of each name that people see."""


def _data(run: VlmRun) -> Iterator[Wave]:
    """Yield the waves of the conversations, which runs share."""
    sides = [("", False), *([("-held-out", True)] if run.validates else [])]
    # If both sides have equal data, they share one index and one artifact of tokens.
    listed = {run.index(held_out=side).slot: (ending, side) for ending, side in reversed(sides)}
    tokenized = {run.tokens_slot(held_out=side): (ending, side) for ending, side in reversed(sides)}
    for _, (ending, side) in reversed(listed.items()):
        yield Wave(Step.of(f"index{ending}", run.index(held_out=side)))
    for slot, (ending, side) in reversed(tokenized.items()):
        yield Wave(Step(f"tokenize{ending}", "vlm_tokenize", slot, partial(run.tokenize, held_out=side)))


def _step(parent: str, stage: str, slot: str, request: Callable[[VlmRun, int], Request], run: VlmRun, k: int) -> Step:
    return Step(f"{parent}/{stage}", KINDS[stage], slot, partial(request, run, k), k)
