"""Everything a run does, as a list of waves. `run` makes them; `plan`, `status` and `rerun` walk them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.listing.listings import looks_in_listings
from cosmos_rl_core.storage import store
from flows.planning import kinds, requests
from flows.planning.base import AnyRun
from flows.planning.run import Run
from flows.planning.steps import Step, Wave
from stages.artifacts.generations import has_begun
from stages.artifacts.request import Request

Selection = Callable[[int], bool]
"""A choice of policy versions or iterations: returns whether a number is chosen."""


def post_train(
    run: AnyRun, exported: Selection | None = None, judged: Selection | None = None, decoded: Selection | None = None
) -> Iterator[Wave]:
    """Yield the waves of a run, in order. The stages of a wave run side by side.

    ``exported`` and ``judged`` choose the policy versions that are exported and evaluated. By default the recipe does.
    ``decoded`` chooses the rollouts whose remaining samples are decoded too, if the recipe decodes only a share of
    them; by default none.
    """
    if (kind := kinds.of(run.plan)) is not None:
        yield from kind.waves(run, exported, judged)
        return
    assert isinstance(run, Run)
    slots, num_iterations = run.slots, run.recipe.train.num_iterations
    if run.plan.first == 0:
        yield Wave(Step("policy", "policy", slots.policy(0), partial(requests.policy, run)))
    # Text embeddings and latents, which runs share. Prompts of a large set are embedded when iterations need them.
    for name, request in run.prepared.steps().items():
        yield Wave(Step.of(name, request))
    for k in range(run.plan.first, num_iterations + 1):
        if k > run.plan.first:
            yield from iteration(run, k - 1, last=k == num_iterations)
            if decoded is not None and run.recipe.rollout.decode_share < 1 and decoded(k - 1):
                yield from decoding(run, k - 1)
        if (exported or run.exports)(k):
            export = partial(requests.export, run, k)
            yield Wave(Step(f"policy-{k:04d}/export", "export", slots.version(k, "export"), export, k))
        if (judged or run.is_due)(k):
            yield from evaluation(run, k)
    due = [k for k in range(run.plan.baseline, num_iterations + 1) if run.is_due(k)]
    report = partial(requests.report, run, num_iterations, due)
    yield Wave(Step("report", "report", slots.report, report))


def iteration(run: Run, k: int, *, last: bool) -> Iterator[Wave]:
    """Yield the waves that take policy version k to version k + 1."""

    def step(stage: str, kind: str, request: Callable[[], Request], k: int = k) -> Step:
        return Step(f"iteration-{k:04d}/{stage}", kind, run.slots.iteration(k, stage), request, k)

    def rollout(k: int) -> Step:
        return step("rollout", "rollout", partial(requests.rollout, run, k), k)

    def reward(r: RewardConfig) -> Step:
        kind = requests.stage_for(r).name
        return step(f"reward-{r.fn.label}", kind, partial(requests.reward, run, r, samples, k))

    if not run.trains_on_rewards:
        yield Wave(step("finetune", "finetune", partial(requests.finetune, run, k)))
        return
    samples, generates = run.slots.iteration(k, "rollout"), run.plan.generates
    stale = run.recipe.train.staleness > 0 and generates
    if k == run.plan.first or not stale:
        yield from embedding(run, k)
    if generates and (k == run.plan.first or not stale):
        yield Wave(rollout(k))
    yield Wave(*map(reward, run.scored))
    if run.warns:
        yield Wave(step("warn", "warn", partial(requests.warn, run, k)))
    if stale and not last:
        yield from embedding(run, k + 1)
    # A stale rollout reads nothing of this update, so both run side by side.
    ahead = [rollout(k + 1)] if stale and not last else []
    shown = step("fragment", "fragment", partial(requests.fragment, run, k))
    yield Wave(step("update", "update", partial(requests.update, run, k)), shown, *ahead)


def embedding(run: Run, k: int) -> Iterator[Wave]:
    """Yield the wave that embeds the prompts of several iterations from k on; nothing if an earlier one embeds k's."""
    together = run.prepared.embedded_with(k)
    if together is not None and k == together.start:
        request = run.prepared.embed_at(k)
        yield Wave(Step(f"iteration-{k:04d}/embed", "embed", request.slot, lambda: request, k))


def decoding(run: Run, k: int) -> Iterator[Wave]:
    """Yield the wave that decodes the samples that rollout k left undecoded, if the recipe decodes only a share."""
    request = partial(requests.decode, run, k)
    yield Wave(Step(f"iteration-{k:04d}/decode", "decode", run.slots.iteration(k, "decode"), request, k))


def evaluation(run: Run, k: int) -> Iterator[Wave]:
    """Yield the waves that evaluate policy version k: its held-out loss, samples of its export, and their scores."""

    def step(stage: str, kind: str, request: Callable[[], Request]) -> Step:
        return Step(f"policy-{k:04d}/{stage}", kind, run.slots.version(k, stage), request, k)

    def reward(r: RewardConfig) -> Step:
        kind = requests.stage_for(r).name
        return step(f"evaluate-{r.fn.label}", kind, partial(requests.reward, run, r, samples, k))

    samples = run.slots.version(k, "evaluate")
    if run.validates:
        yield Wave(step("validate", "validate", partial(requests.validate, run, k)))
    if run.evaluates:
        yield Wave(step("evaluate", "evaluate", partial(requests.evaluate, run, k)))
    if run.evaluates and run.recipe.rewards:
        yield Wave(*map(reward, run.recipe.rewards))
    if run.evaluates or run.validates:
        yield Wave(step("fragment", "fragment", partial(requests.judged, run, k)))


def steps(run: AnyRun, *, undecoded: bool = False) -> list[Step]:
    """Return every step of the run, with exports and evaluations begun under fewer iterations or other settings.

    With ``undecoded`` also the step ``decode`` of every rollout, begun or not.
    """
    evaluating = [stage for stage, runs in (("validate", run.validates), ("evaluate", run.evaluates)) if runs]

    # In a look, each question lists a folder. Most versions have no folder, so one listing tells which do.
    there = store.names(store.join(run.url, "exports")) if looks_in_listings() else None

    def begun(k: int, stage: str) -> bool:
        return (there is None or f"{k:04d}" in there) and has_begun(run.slots.version(k, stage))

    def exported(k: int) -> bool:
        return run.exports(k) or begun(k, "export")

    def judged(k: int) -> bool:
        return run.is_due(k) or (exported(k) and any(begun(k, stage) for stage in evaluating))

    def decoded(k: int) -> bool:
        return undecoded or has_begun(run.slots.iteration(k, "decode"))

    return [step for wave in post_train(run, exported, judged, decoded) for step in wave.steps]


def steps_before(run: AnyRun) -> list[Step]:
    """Return the steps before a fork's first policy version: its slots refer to their artifacts. Empty for others."""
    if run.plan.origin is None:
        return []
    whole = replace(run, plan=run.plan.model_copy(update={"origin": None}))
    own = {step.name for step in steps(run)}
    return [step for step in steps(whole) if step.name not in own]
