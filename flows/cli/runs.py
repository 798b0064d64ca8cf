"""The command that lists and compares runs."""

from importlib import import_module
from typing import Annotated

import typer
from typer import Argument

from flows.cli.command import JsonOption, StoreOption, command, print_json, print_parts
from flows.defaults import DEFAULT_STORE

runs_app = typer.Typer()


@command(runs_app, "runs")
def runs(
    names: Annotated[list[str] | None, Argument(metavar="[RUN]...", help="Runs to compare; default: all")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """List the runs of a store: state, iterations, reward before and now, time left, device time.

    Of runs that are named, also the settings in which they differ from the first.

    Examples:
        cosmos-flows runs
        cosmos-flows runs nft-1a2b3c4d nft-5e6f7a8b
        cosmos-flows runs --store s3://bucket/prefix --json
    """
    all_runs = import_module("flows.watching.all_runs")
    found = all_runs.all_runs(store, names or ())
    if as_json:
        print_json(found)
        return
    print_parts(*all_runs.rendered(found, store))
    if names:
        print_parts(*all_runs.settings_that_differ(store, names))
