"""The command that plans a recipe."""

from typer import Context

from flows.cli.base.options import (
    ClusterOption,
    IterationsOption,
    JsonOption,
    OverridesOption,
    RecipeArgument,
    RunIdOption,
    StoreOption,
)
from flows.cli.base.planned import gpu_slots_of, planned
from flows.cli.base.printing import print_json, print_parts
from flows.defaults import DEFAULT_STORE, STORE_VARIABLE
from flows.explaining import explain
from flows.planning.steps import require_same_as_written


def plan(
    context: Context,
    recipe: RecipeArgument,
    store: StoreOption = DEFAULT_STORE,
    run_id: RunIdOption = None,
    iterations: IterationsOption = None,
    overrides: OverridesOption = None,
    cluster: ClusterOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a recipe and show what a run would do, with its sizes, its memory and an estimate of its time.

    All mistakes are reported at once. Nothing is started or written. Only config files of the base model are needed.

    Examples:
        cosmos-flows plan configs/tiny/nft.toml
        cosmos-flows plan configs/tiny/nft.toml --set rollout.n_generation=8
        cosmos-flows plan configs/tiny/nft.toml --json
    """
    asked = (recipe, store, run_id, iterations, overrides or (), cluster)
    found = planned(*asked, without_weights=True)
    require_same_as_written(found, store)
    named_by, gpu_slots = _store_named_by(context), gpu_slots_of(found.recipe.launch, required=False)
    if as_json:
        print_json(explain.as_json(found, store, gpu_slots=gpu_slots) | {"store_from": named_by})
    else:
        print_parts(*explain.explained(found, store, f" (store from {named_by})", gpu_slots=gpu_slots))


def _store_named_by(context: Context) -> str:
    """Return where the store's name comes from: ``--store``, the environment variable or ``the default``."""
    source = context.get_parameter_source("store")
    names = {"COMMANDLINE": "--store", "ENVIRONMENT": STORE_VARIABLE}
    return names.get("" if source is None else source.name, "the default")
