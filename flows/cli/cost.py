"""The command that shows what a run cost."""

from importlib import import_module
from typing import Annotated

import typer
from typer import Argument, Option

from flows.cli.command import LOOK, JsonOption, StoreOption, command, print_json, print_parts
from flows.defaults import DEFAULT_STORE

cost_app = typer.Typer()
EXAMPLE = "one with the line device_hour = 2.5"


@command(cost_app, "cost", LOOK)
def cost(
    run_id: Annotated[str, Argument(metavar="RUN", help="Id of the run")],
    store: StoreOption = DEFAULT_STORE,
    prices: Annotated[str | None, Option(help="TOML file with the fields of launch.prices, in their place")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the seconds, device hours and bytes of a run went: by stage, iteration and sample.

    Attempts that failed or were killed count too.

    Examples:
        cosmos-flows cost nft-1a2b3c4d
        cosmos-flows cost nft-1a2b3c4d --prices prices.toml
        cosmos-flows cost nft-1a2b3c4d --store s3://bucket/prefix --json
    """
    config, table = None, import_module("cosmos_rl_core.config.clusters").PricesConfig
    if prices is not None:
        recipe = import_module("cosmos_rl_core.recipes.reading")
        config = recipe.validated(table, recipe.read_toml(prices, EXAMPLE), prices)
    found = import_module("flows.library").open_run(run_id, store).cost(config)
    print_json(found.as_json()) if as_json else print_parts(*found.parts())
