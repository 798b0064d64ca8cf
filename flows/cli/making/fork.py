"""The command that forks a run."""

from functools import partial
from importlib import import_module
from typing import Annotated

from typer import Option

from flows.cli.base.flowing import flowing
from flows.cli.base.options import (
    ClusterOption,
    DryRunOption,
    IterationsOption,
    JsonOption,
    OverridesOption,
    RunArgument,
    StoreOption,
)
from flows.cli.base.planned import gpu_slots_of, misfits
from flows.cli.base.printing import print_found, print_json
from flows.defaults import DEFAULT_STORE
from flows.explaining import explain
from flows.forking.plan import plan_of_fork
from flows.forking.work import planned_fork
from flows.library import open_run
from flows.planning.plan import ForkOf, Settings
from flows.running.tags import tags_of

At = Annotated[int, Option(min=0, help="Policy version that the fork begins with, from 0")]
Rewards = Annotated[str | None, Option(help="TOML with the fork's [[rewards]]; default: RUN's")]


def fork(
    run: RunArgument,
    at: At,
    store: StoreOption = DEFAULT_STORE,
    run_id: Annotated[str | None, Option(help="Name of the fork; default: from RUN and the changes")] = None,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    rewards: Rewards = None,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, Option(help="Accept other versions or devices")] = False,
    remake: Annotated[bool, Option(help="Make artifacts of changed stages again")] = False,
    accept_scorer: Annotated[bool, Option(help="Accept that the reward service's scorer changed")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Begin a new run in the middle of another one, and run it to the end. The same command continues it.

    The new run refers to what RUN made before, and to later artifacts that its own recipe would make too. Nothing is
    copied or changed. --dry-run says what it refers to, and the samples that it would generate, score and train on.

    Examples:
        cosmos-flows fork nft-1a2b3c4d --at 8 --set train.optm_lr=3e-4
        cosmos-flows fork nft-1a2b3c4d --at 8 --rewards rewards.toml --iterations 24
    """
    wanted, changes = ForkOf(run, at, rewards), tuple(overrides or ())
    settings = Settings("", store, run_id, iterations, changes, cluster)
    plan = plan_of_fork(wanted, settings, misfits=partial(misfits, runs_here=True))
    if dry_run:
        planned = planned_fork(plan, store)
        gpu_slots = gpu_slots_of(plan.recipe.launch, required=False)
        print_found(planned, [*planned.lines(), *explain.explained(plan, store, gpu_slots=gpu_slots)], as_json=as_json)
        return
    options = (iterations, overrides, rewards, cluster, allow_numerics_change, remake, accept_scorer)
    tags = tags_of(plan.recipe.train.train_policy.type, plan.model.adapter)
    with flowing(tags, f"the same command continues {plan.run_id}", as_json=as_json):
        import_module("flows.branches.fork").fork(run, at, store, plan.run_id, *options)
    if as_json:
        print_json(open_run(plan.run_id, store).now())
