"""Steps and waves: the parts of the list of stages that a run goes through."""

import difflib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.storage import store
from flows.planning.base import AnyRun
from flows.planning.plan import PLAN_FILE, Plan, read_plan, require_same, run_url
from flows.planning.run import run_of
from stages.artifacts.generations import has_begun
from stages.artifacts.request import Request


@dataclass(frozen=True)
class Step:
    """One stage of a run."""

    name: str
    """Name of the step, such as ``policy``, ``iteration-0003/update`` or ``policy-0016/export``."""
    kind: str
    """The stage that runs, a key of :data:`stages.registry.STAGES`."""
    slot: str
    request: Callable[[], Request]
    """Returns its Request. Raises :class:`ArtifactError` if an input has no artifact, or a damaged one."""
    k: int | None = None
    """The iteration, or the policy version that it judges; None for a stage that runs once."""
    wave: str = ""
    """Name of the step's wave."""

    @classmethod
    def of(cls, name: str, request: Request) -> Self:
        """Return the step of a Request that is known before anything runs."""
        return cls(name, request.stage, request.slot, lambda: request)

    @property
    def parent(self) -> str:
        """Return the part of the name before the slash, such as ``iteration-0003``; ``""`` without a slash."""
        return self.name.rpartition("/")[0]

    @property
    def stage(self) -> str:
        """Return the name after the slash, such as ``reward-ocr``."""
        return self.name.rpartition("/")[2]


class Wave:
    """Steps that run side by side."""

    def __init__(self, *steps: Step) -> None:
        self.parent = parent = steps[0].parent
        self.name = f"{parent}/" * bool(parent) + "+".join(step.stage for step in steps)
        """Name, such as ``policy`` or ``iteration-0003/reward-jpeg+reward-ocr``, with the parent of the first step."""
        self.steps = tuple(replace(step, wave=self.name) for step in steps)


def require_same_as_written(plan: Plan, store_url: str) -> None:
    """Raise like :func:`require_same` if the run was planned before with other settings. Write nothing."""
    # Without its files, the model has no digest to compare.
    if plan.model.digest and store.read_if_exists(store.join(run_url(store_url, plan.run_id), PLAN_FILE)) is not None:
        require_same(read_plan(store_url, plan.run_id), plan)


def read_run(store_url: str, run_id: str) -> AnyRun:
    """Return a run that exists, with as many iterations as were planned or begun, whichever is more."""
    run = run_of(read_plan(store_url, run_id), store_url)
    planned = run.recipe.train.num_iterations
    first = "rollout" if run.trains_on_rewards else "finetune"
    # With staleness, a rollout begins before the update of the previous iteration.
    return run.going_to(
        next(
            k
            for k in itertools.count(planned)
            if not any(has_begun(run.slots.iteration(k, stage)) for stage in (first, "update"))
        )
    )


def find(every: Sequence[Step], run_id: str, stage: str, iteration: int | None) -> Step:
    """Return the step of a stage in an iteration or policy version. Raises :class:`ConfigError` if there is none."""
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
    counted = "policy version" if found[ks[0]].parent.startswith("policy-") else "iteration"
    if iteration is None:
        raise ConfigError(f"{stage} needs --iteration: which {counted}, from 0")
    shown = f"0 to {ks[-1]}" if ks == list(range(len(ks))) else ", ".join(map(str, ks))
    raise ConfigError(f"{run_id} has no {stage} of {counted} {iteration}; known: {shown}")
