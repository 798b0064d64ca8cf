"""What every flow does around the loop: plan, freeze, run, say how it went."""

import shlex

from prefect import Flow, flow
from prefect.runtime import flow_run

from cosmos_rl_core import plugins
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._base import ServedReward
from flows.display import Display
from flows.launch import Launcher
from flows.plan import DEFAULT_STORE, Plan, Settings, freeze, plan_of
from flows.post_train import Result, post_train
from flows.requests import Run
from flows.tracking import Tracker
from stages.manifest import Manifest


def run_name() -> str:
    """The flow run's name in the UI: its run id, or its recipe's name."""
    parameters = flow_run.get_parameters()
    return str(parameters.get("run_id") or parameters["recipe"])


def training_flow(algorithm: str, description: str) -> Flow[..., None]:
    """The Prefect flow of one algorithm; all of them take the same parameters."""

    @flow(name=algorithm, description=description, flow_run_name=run_name)
    def run(
        recipe: str,
        store: str = DEFAULT_STORE,
        run_id: str | None = None,
        iterations: int | None = None,
        overrides: list[str] | None = None,
        cluster: str | None = None,
        allow_numerics_change: bool = False,
    ) -> None:
        """Take a recipe to its end, or go on with it.

        Args:
            recipe: Path of the TOML recipe.
            store: Directory or URL (s3://bucket/prefix) of all runs.
            run_id: Name of the run; the same name goes on with the same run. Default: from the recipe and its contents.
            iterations: How far to go, instead of the recipe's number.
            overrides: Settings of the recipe to change, as section.key=value.
            cluster: Path of a TOML file that says how processes are launched, e.g. deployments/clusters/local.toml.
            allow_numerics_change: Go on under other versions, threads or devices than the run began with.
        """
        train(
            Settings(recipe, store, run_id, iterations, tuple(overrides or ()), cluster, allow_numerics_change),
            algorithm,
        )

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
    with Display() as display:
        display.note(f"run {plan.run_id}: {run.url}")
        if not plan.races_decided:
            display.note("this store lets a second writer replace the first: have one process write this run at a time")
        with Tracker(run, display.note) as tracker:
            launcher = Launcher(run.url, plan.recipe.launch, display, settings.allow_numerics_change, tracker.done)
            try:
                result = post_train(run, launcher)
            finally:
                launcher.close()
        for line in closing_lines(run, settings, result):
            display.note(line)


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
