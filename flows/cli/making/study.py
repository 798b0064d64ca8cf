"""The command that runs a recipe with several seeds."""

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
    NameOption,
    OverridesOption,
    RecipeArgument,
    StoreOption,
    SweepsOption,
)
from flows.cli.base.planned import misfits
from flows.cli.base.printing import print_found, print_json
from flows.defaults import DEFAULT_STORE
from flows.planning.plan import Settings
from flows.running.tags import tags_of


def study(
    recipe: RecipeArgument,
    seeds: Annotated[str, Option(help="Seeds: 0-4")],
    store: StoreOption = DEFAULT_STORE,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    sweeps: SweepsOption = None,
    name: NameOption = None,
    cluster: ClusterOption = None,
    allow_numerics_change: Annotated[bool, Option(help="Accept other versions or devices")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a recipe with several seeds, and settings, and compare them on one page. The same command continues it.

    Runs share what depends on neither seed nor setting, and runs of a seed all that was made before their first update.
    --dry-run says what all of it would cost.

    Examples:
        cosmos-flows study package:tiny/nft --seeds 0-4
        cosmos-flows study recipe.toml --seeds 0,1 --sweep train.optm_lr=1e-4,3e-4
    """
    plans = import_module("flows.studying.over_seeds")
    settings = Settings(recipe, store, None, iterations, tuple(overrides or ()), cluster, allow_numerics_change)
    fits = partial(misfits, runs_here=True)
    found, planned = plans.plan_of_study(settings, seeds=seeds, sweeps=sweeps or (), name=name, misfits=fits)
    if dry_run:
        cost = import_module("flows.studying.members").planned_study(found, planned, store)
        print_found(cost, cost.lines(), as_json=as_json)
        return
    plan = planned[0].plan
    tags = tags_of(plan.recipe.train.train_policy.type, plan.model.adapter)
    with flowing(tags, f"the same command continues {found.name}", as_json=as_json):
        options = (iterations, overrides, sweeps, name, cluster, allow_numerics_change)
        import_module("flows.branches.study").study(recipe, seeds, store, *options)
    if as_json:
        print_json(import_module("flows.studying.study").numbers_of(found, store))
