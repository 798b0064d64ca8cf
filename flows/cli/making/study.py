"""The command that runs a recipe with several seeds."""

from functools import partial
from importlib import import_module
from typing import Annotated, Any

from typer import Option

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
from flows.cli.base.studying import make_study
from flows.defaults import DEFAULT_STORE
from flows.planning.plan import Settings


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

    All runs share artifacts that depend on neither seed nor setting, and runs of one seed all before the first update.
    --dry-run says what all of it would cost.

    Examples:
        cosmos-flows study package:tiny/nft --seeds 0-4
        cosmos-flows study recipe.toml --seeds 0,1 --sweep train.optm_lr=1e-4,3e-4
    """
    plans = import_module("flows.studying.over_seeds")
    settings = Settings(recipe, store, None, iterations, tuple(overrides or ()), cluster, allow_numerics_change)
    fits = partial(misfits, runs_here=True)
    found, planned = plans.plan_of_study(settings, seeds=seeds, sweeps=sweeps or (), name=name, misfits=fits)
    options = (iterations, overrides, sweeps, name, cluster, allow_numerics_change)

    def make(flows: Any) -> None:
        flows.study(recipe, seeds, store, *options)

    make_study(found, planned, store, make, dry_run=dry_run, as_json=as_json)
