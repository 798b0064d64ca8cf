"""The command that writes pages of a dataset."""

from importlib import import_module
from typing import Annotated, Any

from typer import Argument, Option

from flows.cli.base.options import JsonOption, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE

SNAPSHOT = "Name of a dataset, or NAME@NUMBER of a snapshot; default: the newest"


def show(
    snapshot: Annotated[str, Argument(help=SNAPSHOT)],
    store: StoreOption = DEFAULT_STORE,
    output: Annotated[str | None, Option(help="Folder for the pages; default: NAME@NUMBER")] = None,
    first: Annotated[int, Option(min=1, max=1000, help="Items on a page")] = 100,
    all_pages: Annotated[bool, Option("--all", help="Write the pages after the first, too")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write HTML pages with the media of a snapshot, their captions and sizes, and what was left out.

    Examples:
        cosmos-flows data show clips
        cosmos-flows data show clips@3 --store s3://bucket/prefix --all
    """
    operation: Any = import_module("flows.operations.show_data")  # reads tables with pandas
    found = operation.show(store, snapshot, output, first, all_pages=all_pages)
    print_found(found, found.lines(), as_json=as_json)
