"""A run as a list: every stage that :func:`flows.post_train.post_train` goes through, in its order."""

import difflib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cosmos_rl_core.errors import ConfigError
from flows.planning.plan import read_plan
from flows.planning.requests import Run
from stages.artifacts.generations import has_begun
from stages.artifacts.request import Request


@dataclass(frozen=True)
class Step:
    """One stage of a run."""

    name: str
    """As people read it: ``policy``, ``iteration-0003/update``, ``policy-0016/export``."""
    slot: str
    request: Callable[[], Request]
    """What it would be asked now. Raises :class:`ArtifactError` if an input has no artifact that can be read."""
    k: int | None = None
    """The iteration, or the policy version that it judges; None where there is only one of it."""

    @property
    def group(self) -> str:
        """The part of the name that stages of one iteration or policy version share; empty for the others."""
        return self.name.rpartition("/")[0]

    @property
    def stage(self) -> str:
        """The name within its group: ``reward-ocr``."""
        return self.name.rpartition("/")[2]


def open_run(store_url: str, run_id: str) -> Run:
    """A run that exists, as far as it has gone: that may be further than its plan said when it began."""
    run = Run(read_plan(store_url, run_id), store_url)
    planned = run.recipe.train.num_iterations
    return run.going_to(
        next(k for k in itertools.count(planned) if not any(has_begun(step.slot) for step in _iteration(run, k)))
    )


def steps(run: Run) -> list[Step]:
    """Every stage of the run, and the evaluations that it made when its end was nearer."""
    count = run.recipe.train.num_iterations
    found = [Step("policy", run.policy_slot, run.policy), Step("embed", run.embed_slot, run.embed)]
    found += [Step("encode", run.encode_slot, run.encode)] if run.needs_data else []
    if run.validates:
        for name, request in (("embed-held-out", run.embed_held_out), ("encode-held-out", run.encode_held_out)):
            found.append(Step(name, request().slot, request))
    found += _evaluation(run, 0)
    for k in range(count):
        found += _iteration(run, k)
        if run.is_due(k + 1) or has_begun(run.export_slot(k + 1)):
            found += _evaluation(run, k + 1)
    scored = [k for k in range(count + 1) if run.is_due(k) and run.evaluates]
    return [*found, Step("report", run.slot("report"), partial(run.report, count, scored))]


def of_wave(every: Sequence[Step], wave: str) -> list[Step]:
    """The steps of a wave by its name, ``iteration-0003/reward-jpeg+reward-ocr``; those that are known.

    A rollout beside an update is the next iteration's.
    """
    group, slash, stages = wave.rpartition("/")
    known, names = {step.name: step for step in every}, stages.split("+")
    found = [known.get(f"{group}{slash}{name}") for name in names]
    if "update" in names and (update := found[names.index("update")]) is not None and update.k is not None:
        following = known.get(f"iteration-{update.k + 1:04d}/rollout")
        found = [following if name == "rollout" else step for name, step in zip(names, found, strict=True)]
    return [step for step in found if step is not None]


def find(every: Sequence[Step], run_id: str, stage: str, iteration: int | None) -> Step:
    """The step of that name, and iteration or policy version. Raises :class:`ConfigError` if there is none."""
    known = list(dict.fromkeys(step.stage for step in every))
    if stage not in known:
        close = difflib.get_close_matches(stage, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"unknown stage {stage!r}; known: {', '.join(known)}{hint}")
    found = {step.k: step for step in every if step.stage == stage}
    if iteration in found:
        return found[iteration]
    if None in found:
        raise ConfigError(f"a run has one {stage}; leave --iteration out")
    ks = list(found)
    counted = "policy version" if found[ks[0]].group.startswith("policy-") else "iteration"
    if iteration is None:
        raise ConfigError(f"{stage} needs --iteration: which {counted}, from 0")
    shown = f"0 to {ks[-1]}" if ks == list(range(len(ks))) else ", ".join(map(str, ks))
    raise ConfigError(f"{run_id} has no {stage} of {counted} {iteration}; known: {shown}")


def _iteration(run: Run, k: int) -> list[Step]:
    def step(stage: str, request: Callable[[], Request]) -> Step:
        return Step(f"iteration-{k:04d}/{stage}", run.iteration(k, stage), request, k)

    if not run.trains_on_rewards:
        return [step("finetune", partial(run.finetune, k))]
    samples = run.iteration(k, "rollout")
    rewards = [step(f"reward-{r.fn.label}", partial(run.reward, r, samples, k)) for r in run.recipe.rewards]
    return [step("rollout", partial(run.rollout, k)), *rewards, step("update", partial(run.update, k))]


def _evaluation(run: Run, k: int) -> list[Step]:
    def step(stage: str, request: Callable[[], Request]) -> Step:
        return Step(f"policy-{k:04d}/{stage}", run.version(k, stage), request, k)

    found = [step("export", partial(run.export, k))]
    found += [step("validate", partial(run.validate, k))] if run.validates else []
    if not run.evaluates:
        return found
    samples = run.version(k, "evaluate")
    rewards = [step(f"evaluate-{r.fn.label}", partial(run.reward, r, samples, k)) for r in run.recipe.rewards]
    return [*found, step("evaluate", partial(run.evaluate, k)), *rewards]
