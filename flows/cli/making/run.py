"""The command that runs a recipe."""

from functools import partial
from importlib import import_module
from typing import Annotated

from typer import Option

from flows.cli.base.flowing import flowing
from flows.cli.base.options import (
    ClusterOption,
    IterationsOption,
    JsonOption,
    OverridesOption,
    RecipeArgument,
    RunIdOption,
    StoreOption,
)
from flows.cli.base.planned import planned
from flows.cli.base.printing import notes_on_stderr, print_json
from flows.defaults import DEFAULT_STORE, store_of
from flows.library import open_run
from flows.planning.plan import Settings
from flows.running.server import named_server
from flows.running.tags import tags_of
from flows.session.finished import say_if_finished
from flows.terminal.console import console


def run(
    recipe: RecipeArgument,
    store: StoreOption = DEFAULT_STORE,
    run_id: RunIdOption = None,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, Option(help="Accept other versions or devices")] = False,
    remake: Annotated[bool, Option(help="Make artifacts of changed stages again")] = False,
    accept_scorer: Annotated[bool, Option(help="Accept that the reward service's scorer changed")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe to the end; the same command continues after an interruption.

    Examples:
        cosmos-flows run configs/tiny/nft.toml
        cosmos-flows run configs/tiny/nft.toml --set train.seed=1 --set rollout.n_generation=8
        cosmos-flows run configs/ddrl/2b.toml --store s3://bucket/prefix --cluster deployments/clusters/eight-gpus.toml
    """
    plan = planned(recipe, store, run_id, iterations, overrides or (), cluster)
    others = (iterations, tuple(overrides or ()), cluster, allow_numerics_change, remake, accept_scorer)
    settings = Settings(recipe, store_of(store), plan.run_id, *others)
    with notes_on_stderr(as_json):
        # A flow run on a server of the team is a record of the command, also of one that makes nothing.
        finished = named_server() is None and say_if_finished(plan, settings, partial(console().print, soft_wrap=True))
    if not finished:
        algorithm = plan.recipe.train.train_policy.type
        tags = tags_of(algorithm, plan.model.adapter)
        with flowing(tags, f"the same command continues {plan.run_id}", as_json=as_json):
            session = import_module("flows.session.session")
            session.flow_of(algorithm, session.description_of(plan), algorithm)(recipe, store, plan.run_id, *others)
    if as_json:
        print_json(open_run(plan.run_id, store).now())
