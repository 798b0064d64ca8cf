"""The frame of every training flow: plan, freeze, run, report the result."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ParamSpec
from uuid import UUID

from prefect import Flow, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.exceptions import Pause
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from cosmos_rl_core import plugins
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.recipe import MAX_ITERATIONS
from cosmos_rl_core.config.train import RewardConfig
from cosmos_rl_core.errors import (
    ApprovalError,
    ConfigError,
    CosmosRLError,
    OffPolicyError,
    StageError,
    StoppedError,
    counted,
    visible,
)
from cosmos_rl_core.rewards._base import ServedReward
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease
from flows.defaults import store_of
from flows.devices import work_folders
from flows.devices.fitting import misfits_of
from flows.forking.plan import plan_of_fork
from flows.forking.references import refer_to_origin
from flows.ledger.ledger import Ledger
from flows.ledger.shape import shape_of
from flows.operations.upgrades import settled
from flows.planning import kinds, requests
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import run_of
from flows.reporting.derived import Deriving
from flows.running import events, gpus, pauses
from flows.running.display import Display
from flows.running.launch import grouped, launch, taken
from flows.running.progress import Reporter
from flows.running.tags import tags_of
from flows.running.wave import Waves
from flows.session.current_waves import CurrentWave, Ended, names_of
from flows.session.finished import line_of, say_end
from flows.session.following import observers_of, tell
from flows.session.loop import make
from flows.session.observers import Observer, observed
from flows.showing.lost_tasks import lost_tasks_ended
from flows.showing.short_errors import log_messages_only
from flows.terminal import commands
from flows.watching.judged import held_out_numbers, result_line
from stages.artifacts.slots import one_look

P = ParamSpec("P")
RunId = Annotated[str, Field(pattern=r"^[\w.-]+$")]
"""The name of a run. A plan refuses letters of other alphabets and long names, with advice."""
Place = Annotated[str, Field(min_length=1)]
"""A path or a URL. An empty one would mean the worker's current directory."""
Override = Annotated[str, Field(pattern=r"^[^=]+=", description="section.key=value")]


def default_run_id(algorithm: str, recipe: str) -> str:
    """Return a name for a run that was given none. It has this flow run's id, so that retries continue the same run."""
    words = str(deployment.get_name() or Path(recipe).stem).split("-")
    others = [word for word in words if word != algorithm]
    return "-".join([algorithm, *others, str(flow_run.get_id())[-8:]])


@contextmanager
def working_on(
    run: AnyRun, config: LaunchConfig, *, allow_numerics_change: bool = False, accept_scorer: bool = False
) -> Iterator[Waves]:
    """Hold the run's lease, and report progress to its store and to people.

    The work may be a part of the run, whose progress becomes ``done`` only when its last wave is made.
    On a worker the lines go to the flow run's log in the UI, elsewhere to the console.
    """
    reporting = Reporter(run.url, lambda: run.is_made, run.recipe.train.num_iterations)
    accepted = {"allow_numerics_change": allow_numerics_change, "accept_scorer": accept_scorer}
    with working_in(run.url, run.plan, config, reporting, **accepted) as waves:
        yield waves


@contextmanager
def working_in(
    url: str,
    plan: AnyPlan,
    config: LaunchConfig,
    reporting: Reporter,
    *,
    allow_numerics_change: bool = False,
    accept_scorer: bool = False,
) -> Iterator[Waves]:
    """Hold the lease of a run, or of a folder of it with artifacts of its own, and report progress there."""
    log = get_run_logger().info if deployment.get_id() else None
    _tag(plan)
    # Prefect asks the server for a concurrency limit for each tag of each task, so tasks get no tags.
    untagged = TagsContext(current_tags=set())
    try:
        with untagged, Lease(store.join(url, "lease")) as lease, reporting as reporter:
            work_folders.remove_abandoned(url)

            def check() -> None:
                lease.check()
                pauses.stop_if_suspended()

            shown = Display(log, reporter)
            ledger = Ledger(url, shape_of(plan), shown.note)
            gpu_slots = gpus.gpu_slots(config)
            waves = Waves(url, config, shown, allow_numerics_change, check, accept_scorer, ledger, gpu_slots)
            reporter.processes = waves.processes
            with shown, closing(waves):
                yield waves
            # Once more: processes of a killed flow may have lived on for a moment.
            work_folders.remove_abandoned(url)
    except Pause:
        pauses.announce_end()
        raise


def _tag(plan: AnyPlan) -> None:
    """Add the recipe's tags to the deployment's, whose default recipe may have been replaced."""
    tags = set(flow_run.get_tags())
    if missing := tags_of(plan.recipe.train.train_policy.type, plan.model.adapter) - tags:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(str(flow_run.get_id())), tags=sorted(tags | missing))


def ends_in_state(work: Callable[P, str]) -> Callable[P, State[None]]:
    """Turn the string that a flow returns into the message of its final state, and this project's errors into states.

    The state holds the error, because Prefect logs all frames of a raised error twice.
    """

    @functools.wraps(work)
    @lost_tasks_ended()
    def flow_of_states(*args: P.args, **kwargs: P.kwargs) -> State[None]:
        log_messages_only()
        try:
            return Completed(message=visible(work(*args, **kwargs)))
        except CosmosRLError as error:
            if isinstance(error, ApprovalError):
                # Now that the lease is free: Resume may follow at once.
                pauses.suspend(error.evidence, visible(str(error)))
            message = error.summary if isinstance(error, StageError) else str(error)
            if isinstance(error, OffPolicyError):
                return Failed(name="OffPolicy", message=visible(message), data=error)
            ended = Cancelled if isinstance(error, StoppedError) else Failed
            return ended(message=visible(message), data=error)

    return flow_of_states


def training_flow(named: Callable[[], None]) -> Flow[..., Any]:
    """Return the Prefect flow of an algorithm, from a function with its name and description.

    It is a function because Prefect looks for a ``def`` with the flow's name in its file.
    """
    return flow_of(named.__name__, named.__doc__, named.__name__)


def any_training_flow(named: Callable[[], None]) -> Flow[..., Any]:
    """Return a Prefect flow for recipes of every algorithm, from a function with its name and description."""
    return flow_of(named.__name__, named.__doc__)


def description_of(plan: AnyPlan) -> str | None:
    """Return the description of the flow of a plan."""
    if (kind := kinds.of(plan)) is not None:
        return kind.summary
    return plugins.load("algorithms", plan.recipe.train.train_policy.type).__doc__


def flow_of(title: str, description: str | None, algorithm: str | None = None) -> Flow[..., Any]:
    """Return the Prefect flow named ``title``. With ``algorithm`` it refuses recipes of other algorithms."""

    def run_name() -> str:
        """Return the flow run's name in the UI."""
        parameters = flow_run.get_parameters()
        return str(parameters.get("run_id") or default_run_id(title, str(parameters["recipe"])))

    @flow(name=title, description=description, flow_run_name=run_name)
    @ends_in_state
    def run(
        recipe: Place,
        store: Place | None = None,
        run_id: RunId | None = None,
        iterations: Annotated[int, Field(ge=1, le=MAX_ITERATIONS)] | None = None,
        overrides: list[Override] | None = None,
        cluster: Place | None = None,
        allow_numerics_change: bool = False,
        remake: bool = False,
        accept_scorer: bool = False,
    ) -> str:
        """Run a recipe to its end, or continue it.

        Args:
            recipe: Path of the TOML recipe. It names the model.
            store: Directory or URL (s3://bucket/prefix) of all runs. Default: COSMOS_FLOWS_STORE where the flow runs,
                else outputs.
            run_id: Name of the run; the same name continues the same run. Default: a name with this flow run's id,
                so that its retries continue the run.
            iterations: Number of iterations, instead of the recipe's.
            overrides: Settings of the recipe to change, one in each line: section.key=value.
            cluster: Path of a cluster profile (TOML), e.g. deployments/clusters/local.toml.
            allow_numerics_change: Continue with other package versions, threads or devices than the run began with.
            remake: Make artifacts again whose stages have changed since an earlier version of this code made them.
            accept_scorer: Score samples without scores by another scorer of a reward service than the run began with.
        """
        run_id, changes = run_id or default_run_id(title, recipe), tuple(overrides or ())
        others = (iterations, changes, cluster, allow_numerics_change, remake, accept_scorer)
        return train(Settings(recipe, store_of(store), run_id, *others), algorithm)

    return run


def train(settings: Settings, algorithm: str | None = None) -> str:
    """Run a recipe or a fork to the end, reusing current artifacts, and return its result in one line.

    With ``algorithm``, raises :class:`ConfigError` for recipes of another one.
    """
    plan_with = plan_of if settings.fork is None else partial(plan_of_fork, settings.fork)
    plan = plan_with(settings, misfits=partial(misfits_of, gpu_slots_of=gpus.gpu_slots, runs_here=True))
    if algorithm is not None and plan.recipe.train.train_policy.type != algorithm:
        raise ConfigError(
            f"{settings.recipe} trains with {plan.recipe.train.train_policy.type!r}, this flow with {algorithm!r}"
        )
    check_services(plan.recipe.rewards)
    plan = freeze(plan, settings.store)
    run = run_of(plan, settings.store)
    accepted = {"allow_numerics_change": settings.allow_numerics_change, "accept_scorer": settings.accept_scorer}
    with working_on(run, plan.recipe.launch, **accepted) as waves:
        note = waves.display.note
        note(f"run {plan.run_id}: {run.url}")
        if not plan.races_decided:
            note("this store cannot refuse a second writer: run one process at a time on this run")
        if plan.origin is not None and (count := refer_to_origin(run)):
            note(f"begins with {plan.origin.words}: refers to {counted(count, 'artifact')}, no file is copied")
        run = settled(run, remake=settings.remake)
        waves.overlapping = partial(requests.rewards_ahead, run)
        if not settings.of_study:
            commands.keep(run, settings)
        deriving = Deriving(run)
        with observers_of(run, waves, deriving) as observers:
            make(run, observed(partial(launch, waves), observers), grouped, partial(_take, waves, observers, deriving))
        with one_look():
            say_end(run, settings, note)
            numbers = held_out_numbers(run)
            result = result_line(run, numbers)
    # Now that the lease is free.
    if waves.begun:
        events.run_finished(run, result, numbers)
    return result


def _take(
    waves: Waves, observers: Sequence[Observer], deriving: Deriving, current: Sequence[CurrentWave], ended: Ended
) -> None:
    """Tell the observers of waves that are already made, in order, and print one line for all of them."""
    waves.display.note(line_of(current))
    taken(waves, names_of(current), partial(tell, observers, deriving, current, ended, waves.check))


def check_services(rewards: Sequence[RewardConfig]) -> None:
    """Raise :class:`ConfigError` now, and not after a rollout, if the address of a reward service is not set."""
    for reward in rewards:
        scorer = plugins.load("rewards", reward.fn.name).Reward(reward.fn)
        if isinstance(scorer, ServedReward):
            scorer.check_service()
