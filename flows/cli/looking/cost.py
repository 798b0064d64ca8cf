"""The command that shows what a run cost."""

from typing import Annotated

from typer import Option

from cosmos_rl_core.config.clusters import PricesConfig
from cosmos_rl_core.recipes import reading
from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE
from flows.library import open_run

EXAMPLE = "one with the line device_hour = 2.5"


def cost(
    run_id: RunArgument,
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
    config = None
    if prices is not None:
        config = reading.validated(PricesConfig, reading.read_toml(prices, EXAMPLE), prices)
    found = open_run(run_id, store).cost(config)
    print_found(found, found.parts(), as_json=as_json)
