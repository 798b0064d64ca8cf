"""The command that writes, opens and serves the reports of runs."""

import webbrowser
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.base.options import JsonOption, StoreOption
from flows.cli.base.printing import print_found, say
from flows.defaults import DEFAULT_STORE, REPORTS_PORT
from flows.library import open_run

HOST = "127.0.0.1"


def report(
    run_id: Annotated[str | None, Argument(metavar="RUN", help="Id of the run; without it only --serve")] = None,
    store: StoreOption = DEFAULT_STORE,
    open_it: Annotated[bool, Option("--open", help="Open the page in the browser")] = False,
    serve: Annotated[bool, Option("--serve", help="Serve the reports of all runs of the store until Ctrl-C")] = False,
    host: Annotated[
        str | None, Option(help=f"With --serve: the address to listen at, {HOST} by default; 0.0.0.0 for every network")
    ] = None,
    port: Annotated[
        int | None, Option(min=0, max=65535, help=f"With --serve: {REPORTS_PORT} by default; 0 takes a free one")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the report of a run that is at work, failed or finished, and print its address. Changes no artifact.

    A run writes the same page after each iteration. With --serve, a read-only server shows all runs of the store on
    one page, and the report of each as it is now. If COSMOS_FLOWS_REPORTS is its address, flows link to it in Prefect.

    Examples:
        cosmos-flows report RUN --open
        cosmos-flows report RUN --store s3://bucket/prefix
        cosmos-flows report --serve --port 8090
    """
    if serve:
        if run_id is not None or open_it or as_json:
            raise ConfigError("--serve shows all runs until it is stopped: use it without RUN, --open and --json")
        import_module("flows.reporting.serving").serve(
            store, HOST if host is None else host, REPORTS_PORT if port is None else port, say
        )  # brings the server along
        return
    if host is not None or port is not None:
        raise ConfigError("--host and --port belong to --serve: add it, or leave them out")
    if run_id is None:
        raise ConfigError("name a run, or serve the reports of all runs with --serve")
    if open_it and "://" in store:
        raise ConfigError(f"--open needs a page on this machine, the store is {store}; leave --open out")
    opened = open_run(run_id, store)
    reporting: Any = import_module("flows.reporting.report")  # reads tables with pandas
    address = reporting.write_report(opened)
    print_found({"run": opened.id, "report": address}, [address], as_json=as_json)
    if open_it:
        webbrowser.open(Path(address).as_uri())
