"""Studies as Prefect flows: what-ifs on the rollouts of a run, and a recipe with several seeds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Annotated, Any

from prefect import flow, get_run_logger
from prefect.runtime import deployment, flow_run
from pydantic import Field

from cosmos_rl_core.config.recipe import MAX_ITERATIONS
from cosmos_rl_core.errors import DivergenceError, OffPolicyError, StageError
from flows.defaults import store_of
from flows.devices.fitting import misfits_of
from flows.lineage.origin import MAX_DRIFT, StoredRollouts
from flows.planning.plan import Settings
from flows.running import gpus
from flows.session.session import Override, Place, RunId, ends_in_state, train
from flows.terminal.console import console
from stages.artifacts.slots import current_of

Numbers = Annotated[str, Field(pattern=r"^[0-9, -]+$")]
Sweeps = list[Override]
_ENDS = (OffPolicyError.kind, DivergenceError.kind)
"""Kinds of failures after which a study goes on with its next run."""


def what_if_name() -> str:
    """Return the flow run's name in the UI."""
    return f"what if on {flow_run.get_parameters()['run']}"


def study_name() -> str:
    """Return the flow run's name in the UI."""
    parameters = flow_run.get_parameters()
    return f"{str(parameters['recipe']).rpartition('/')[2]}, seeds {parameters['seeds']}"


@flow(name="what-if", description="Train other settings on the stored rollouts of a run.", flow_run_name=what_if_name)
@ends_in_state
def what_if(
    run: RunId,
    store: Place | None = None,
    iterations: Numbers | None = None,
    algorithm: str | None = None,
    overrides: list[Override] | None = None,
    rewards: Place | None = None,
    sweeps: Sweeps | None = None,
    anchor: str | None = None,
    max_drift: Annotated[float, Field(gt=0)] = MAX_DRIFT,
    controls: Annotated[int, Field(ge=0, le=20)] = 3,
    name: RunId | None = None,
    cluster: Place | None = None,
    allow_numerics_change: bool = False,
) -> str:
    """Train other settings on the stored rollouts of a run, or continue such a study. The run itself does not change.

    Args:
        run: Name of the run.
        store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs, else
            outputs.
        iterations: Iterations whose rollouts are trained on, such as 0-15. Default: all iterations of the run.
        algorithm: Algorithm in place of the run's.
        overrides: Settings of the run's recipe to change, one in each line: section.key=value.
        rewards: Path of a TOML file with other rewards.
        sweeps: Settings with several values, one in each line: section.key=value,value. Every combination is trained.
        anchor: Policy with which NFT compares: own or behaviour. Default: own; with staleness, behaviour.
        max_drift: Drift at which a chain of updates ends.
        controls: Number of control runs of each setting, with rewards shuffled within their groups.
        name: Name of the study. Default: from the run and the settings.
        cluster: Path of a cluster profile (TOML). Default: the launch settings of the run.
        allow_numerics_change: Continue with other package versions, threads or devices than it began with.
    """
    # Imported here because they need pandas, and Prefect imports this file again to cancel a flow run.
    plans = import_module("flows.studying.what_if")
    changes = tuple(overrides or ())
    settings = Settings("", store_of(store), None, None, changes, cluster, allow_numerics_change)
    chosen = {"iterations": iterations, "algorithm": algorithm, "rewards": rewards, "controls": controls, "name": name}
    stored = StoredRollouts.model_validate({"anchor": anchor, "max_drift": max_drift})
    study, planned = plans.plan_of_what_if(run, settings, stored, sweeps=sweeps or (), misfits=_misfits(), **chosen)
    return _made(study, planned, settings.store, lambda one: one.settings)


@flow(name="study", description="Run a recipe with several seeds and settings.", flow_run_name=study_name)
@ends_in_state
def study(
    recipe: Place,
    seeds: Numbers,
    store: Place | None = None,
    iterations: Annotated[int, Field(ge=1, le=MAX_ITERATIONS)] | None = None,
    overrides: list[Override] | None = None,
    sweeps: Sweeps | None = None,
    name: RunId | None = None,
    cluster: Place | None = None,
    allow_numerics_change: bool = False,
) -> str:
    """Run a recipe with several seeds and settings, and compare them. The same parameters continue it.

    Args:
        recipe: Path of the TOML recipe.
        seeds: Seeds, such as 0-4.
        store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs, else
            outputs.
        iterations: Number of iterations, instead of the recipe's.
        overrides: Settings of the recipe to change, one in each line: section.key=value.
        sweeps: Settings with several values, one in each line: section.key=value,value. Every combination is run.
        name: Name of the study. Default: from the recipe, the seeds and the settings.
        cluster: Path of a cluster profile (TOML).
        allow_numerics_change: Continue with other package versions, threads or devices than it began with.
    """
    plans = import_module("flows.studying.over_seeds")
    changes = tuple(overrides or ())
    settings = Settings(recipe, store_of(store), None, iterations, changes, cluster, allow_numerics_change)
    found, planned = plans.plan_of_study(settings, seeds=seeds, sweeps=sweeps or (), name=name, misfits=_misfits())
    return _made(found, planned, settings.store, plans.as_begun)


def _misfits() -> Callable[..., Any]:
    return partial(misfits_of, gpu_slots_of=gpus.gpu_slots, runs_here=True)


def _made(study: Any, planned: Sequence[Any], store_url: str, begun: Callable[[Any], Settings]) -> str:
    """Make every run of a study, one after the other, then its report; return the result in a line.

    Raises :class:`OffPolicyError` if every setting ended before its last update.
    """
    reports = import_module("flows.studying.report")
    note: Callable[[str], Any] = (
        get_run_logger().info if deployment.get_id() else partial(console().print, soft_wrap=True)
    )
    study.write(store_url)
    note(f"study {study.name}: {study.url(store_url)}")
    ended: dict[str, str] = {}
    for place, one in enumerate(planned):
        note(f"run {place + 1} of {len(planned)}: {one.member.words}")
        if (told := _trained(begun(one), one.member.run)) is not None:
            ended[one.member.run] = told
            note(f"{one.member.words}: {told}")
        # A page of what there is, also if a later run fails.
        reports.write_report(study, store_url, ended)
    report = reports.write_report(study, store_url, ended)
    for line in report.lines():
        note(line)
    changed = [one.member.run for one in planned if not one.member.control][1:]
    if changed and study.of == "what-if" and all(run in ended for run in changed):
        raise OffPolicyError(f"every setting ended before its last update: {'; '.join(ended[run] for run in changed)}")
    return report.result


def _trained(settings: Settings, run_id: str) -> str | None:
    """Make a run, and return why it ended early; None if it did not.

    A run ends early if stored rollouts are too far from its policies, in which case its last policy is evaluated if
    that is possible, or if numbers are not finite.
    """
    try:
        train(settings)
    except StageError as error:
        if error.kind not in _ENDS:
            raise
        reached = _newest(settings.store, run_id)
        ended = f"ended at policy {reached}: {error.summary}"
        begun = 0 if settings.fork is None else settings.fork.at
        try:
            if begun < reached and error.kind == OffPolicyError.kind:
                train(replace(settings, iterations=reached))
        except StageError as again:
            if again.kind not in _ENDS:
                raise
            ended += f"; it cannot be evaluated there: {again.summary}"
        return ended
    return None


def _newest(store_url: str, run_id: str) -> int:
    read_run: Any = import_module("flows.planning.steps").read_run
    run = read_run(store_url, run_id)
    return max(k for k in range(run.recipe.train.num_iterations + 1) if current_of(run.slots.policy(k))[1] is not None)
