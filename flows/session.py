"""What every flow does around the loop: plan, freeze, run, say how it went."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated
from uuid import UUID

from prefect import Flow, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.context import TagsContext
from prefect.exceptions import Pause
from prefect.runtime import deployment, flow_run
from pydantic import Field

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.lease import Lease
from cosmos_rl_core.rewards._base import ServedReward
from flows import pauses
from flows.display import Display
from flows.launch import Launcher
from flows.plan import DEFAULT_STORE, Plan, Settings, freeze, plan_of
from flows.post_train import Result, post_train
from flows.progress import Reporter
from flows.requests import Run
from flows.tags import tags_of
from flows.tracking import Tracker
from stages.manifest import Manifest

RunId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", max_length=100)]
Place = Annotated[str, Field(min_length=1)]
"""A path or a URL; an empty one would be the directory that the worker is in."""
Override = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+=", description="section.key=value")]


def default_run_id(algorithm: str, recipe: str) -> str:
    """The name of a run that was given none: of this flow run, so that its retries go on with the same run."""
    words = str(deployment.get_name() or Path(recipe).stem).split("-")
    return "-".join([algorithm, *(word for word in words if word != algorithm), str(flow_run.get_id())[-8:]])


@contextmanager
def working_on(run: Run) -> Iterator[tuple[Lease, Display]]:
    """Hold the run's lease, and say in its store and to people how far the work is.

    On a worker, people read the flow run's log in the UI; elsewhere the console.
    """
    log = get_run_logger().info if deployment.get_id() else None
    _tag(run.plan)
    # Without the flow run's tags: Prefect asks the server for a concurrency limit by each tag of each task.
    untagged = TagsContext(current_tags=set())
    try:
        with (
            untagged,
            run.lease() as lease,
            Reporter(run.url) as reporter,
            Display(log=log, reporter=reporter) as shown,
        ):
            yield lease, shown
    except Pause:
        pauses.announce_end()
        raise


def _tag(plan: Plan) -> None:
    """Add the tags of the recipe that runs to those of the deployment, whose recipe people may have changed."""
    tags = set(flow_run.get_tags())
    if missing := tags_of(plan.recipe, plan.model.adapter) - tags:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(str(flow_run.get_id())), tags=sorted(tags | missing))


def training_flow(named: Callable[[], None]) -> Flow[..., None]:
    """Make the Prefect flow of an algorithm from a function of its name and description; all take the same parameters.

    A function, because Prefect looks for a ``def`` of the flow's name in its file.
    """
    algorithm = named.__name__

    def run_name() -> str:
        """The flow run's name in the UI."""
        parameters = flow_run.get_parameters()
        return str(parameters.get("run_id") or default_run_id(algorithm, str(parameters["recipe"])))

    @flow(name=algorithm, description=named.__doc__, flow_run_name=run_name)
    def run(
        recipe: Place,
        store: Place = DEFAULT_STORE,
        run_id: RunId | None = None,
        iterations: Annotated[int, Field(ge=1, le=1_000_000)] | None = None,
        overrides: list[Override] | None = None,
        cluster: Place | None = None,
        allow_numerics_change: bool = False,
    ) -> None:
        """Take a recipe to its end, or go on with it.

        Args:
            recipe: Path of the TOML recipe. It names the model.
            store: Directory or URL (s3://bucket/prefix) of all runs.
            run_id: Name of the run; the same name goes on with the same run. Default: made of this flow run's id, so
                that its retries go on with it.
            iterations: How far to go, instead of the recipe's number.
            overrides: Settings of the recipe to change, one a line, as section.key=value.
            cluster: Path of a TOML file that says how processes are launched, e.g. deployments/clusters/local.toml.
            allow_numerics_change: Go on under other versions, threads or devices than the run began with.
        """
        name = run_id or default_run_id(algorithm, recipe)
        settings = Settings(recipe, store, name, iterations, tuple(overrides or ()), cluster, allow_numerics_change)
        train(settings, algorithm)

    return run


def train(settings: Settings, algorithm: str) -> None:
    """Run a recipe of one algorithm to the end, taking up whatever stands of it."""
    plan = plan_of(settings)
    if plan.recipe.train.train_policy.type != algorithm:
        raise ConfigError(
            f"{settings.recipe} trains with {plan.recipe.train.train_policy.type!r}, this flow with {algorithm!r}"
        )
    _check_services(plan)
    plan = freeze(plan, settings.store)
    run = Run(plan, settings.store)
    with working_on(run) as (lease, shown):
        shown.note(f"run {plan.run_id}: {run.url}")
        if not plan.races_decided:
            shown.note("this store lets a second writer replace the first: have one process write this run at a time")
        with Tracker(run, shown.note) as tracker:
            launcher = Launcher(
                run.url, plan.recipe.launch, shown, settings.allow_numerics_change, tracker.done, lease.check
            )
            try:
                result = post_train(run, launcher)
            finally:
                launcher.close()
        for line in closing_lines(run, settings, result):
            shown.note(line)


def _check_services(plan: Plan) -> None:
    """Raise :class:`ConfigError` for a reward service that this process is not told of: now, not after a rollout."""
    for reward in plan.recipe.rewards:
        scorer = plugins.load("rewards", reward.fn.name).Reward(reward.fn)
        if isinstance(scorer, ServedReward):
            scorer.check_service()


def closing_lines(run: Run, settings: Settings, result: Result) -> list[str]:
    """What a run says last: where things are, how to go on, and the held-out reward."""
    iterations = run.recipe.train.num_iterations
    options = ["--store", settings.store, "--run-id", run.plan.run_id, "--iterations", str(2 * iterations)]
    options += [word for override in settings.overrides for word in ("--set", override)]
    options += ["--cluster", settings.cluster] if settings.cluster else []
    options += ["--allow-numerics-change"] if settings.allow_numerics_change else []
    lines = [
        f"report: {run.slot('report')}/{result.report.files['index.html'].path}",
        f"go on: {shlex.join(['cosmos-flows', 'run', settings.recipe, *options])}",
    ]
    if result.before is None or result.after is None:
        return lines
    name = run.headline_reward
    (before, before_error), (after, after_error) = (_score(scores, name) for scores in (result.before, result.after))
    count = result.after.summary["scored"]
    return [
        *lines,
        f"{before} ± {before_error} before, {after} ± {after_error} after, {count} held-out samples each",
        f"held-out reward: {before} -> {after}",
    ]


def _score(scores: Manifest, name: str) -> tuple[str, str]:
    """Mean and standard error, which a single sample does not have."""
    error = scores.summary["standard_error"]
    return f"{scores.summary[name]:.3f}", "?" if error is None else f"{error:.3f}"
