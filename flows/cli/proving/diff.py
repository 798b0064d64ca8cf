"""The command that compares two runs."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from flows.cli.base.options import JsonOption, StoreOption
from flows.cli.base.printing import print_found, say
from flows.defaults import DEFAULT_STORE


def diff(
    run_a: Annotated[str, Argument(metavar="RUN_A", help="Id or URL of a run")],
    run_b: Annotated[str, Argument(metavar="RUN_B", help="Id or URL of another one")],
    store: StoreOption = DEFAULT_STORE,
    html: Annotated[Path | None, Option(help="Also write a page with curves and pictures to this file")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two runs: settings, data, artifacts, rewards, weights and pictures, and where the runs part.

    Both are compared at the newest policy and iteration that both have, and are only read.

    Examples:
        cosmos-flows diff RUN_A RUN_B
        cosmos-flows diff RUN_A RUN_B --html diff.html
        cosmos-flows diff RUN_A s3://bucket/prefix/runs/RUN_B
    """
    comparison: Any = import_module("flows.comparing.comparison")  # reads tables with pandas
    found = comparison.compare(run_a, run_b, store)
    print_found(found, found.parts(), as_json=as_json)
    if html is not None:
        say(import_module("flows.comparing.page").write_page(found, str(html)), err=as_json)
