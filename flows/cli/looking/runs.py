"""The command that lists runs."""

from collections.abc import Sequence
from typing import Annotated

from typer import Argument

from flows.cli.base.command import WRONG_DATA, OwnExitCode
from flows.cli.base.options import JsonOption, StoreOption
from flows.cli.base.printing import print_json, print_parts
from flows.defaults import DEFAULT_STORE
from flows.library import all_runs
from flows.watching import run_list


def runs(
    names: Annotated[list[str] | None, Argument(metavar="[RUN]...", help="Runs to compare; default: all")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """List the runs of a store: state, iterations, reward before and now, time left, device time.

    Runs that are named are also shown with the settings in which they differ from the first. Exit with 65 if one is
    damaged.

    Examples:
        cosmos-flows runs
        cosmos-flows runs nft-1a2b3c4d nft-5e6f7a8b
        cosmos-flows runs --store s3://bucket/prefix --json
    """
    show_runs(store, names or (), as_json=as_json)


def show_runs(store: str, names: Sequence[str] = (), *, as_json: bool) -> None:
    """Print all runs, or the named ones. End with the exit code for wrong data if one is damaged."""
    found = all_runs(store, names)
    damaged = [line.run for line in found if line.state == "damaged"]
    if as_json:
        print_json(found)
    else:
        print_parts(*run_list.rendered(found, store))
        if names and not damaged:
            print_parts(*run_list.settings_that_differ(store, names))
    if damaged:
        raise OwnExitCode(WRONG_DATA)
