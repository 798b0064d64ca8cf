"""The command that writes and opens the report of a run."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.command import (
    LOOK,
    StoreOption,
    command,
    say,
)
from flows.defaults import DEFAULT_STORE

report_app = typer.Typer()


@command(report_app, "report", LOOK)
def report(
    run_id: Annotated[str, Argument(metavar="RUN", help="Id of the run")],
    store: StoreOption = DEFAULT_STORE,
    open_it: Annotated[bool, Option("--open", help="Open the page in the browser")] = False,
) -> None:
    """Write the report of a run that is at work, failed or finished, and print its address. Changes no artifact.

    A run writes the same page after each iteration.

    Examples:
        cosmos-flows report RUN --open
        cosmos-flows report RUN --store s3://bucket/prefix
    """
    if open_it and "://" in store:
        raise ConfigError(f"--open needs a page on this machine, the store is {store}; leave --open out")
    address = import_module("flows.reporting.report").write_report(
        import_module("flows.library").open_run(run_id, store)
    )
    say(address)
    if open_it:
        import_module("webbrowser").open(Path(address).as_uri())
