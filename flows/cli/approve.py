"""The command that lets a suspended run go on."""

from importlib import import_module
from typing import Annotated

from typer import Argument, Option

from flows.cli.command import JsonOption, StoreOption, print_json, print_parts
from flows.defaults import DEFAULT_STORE


def approve(
    run_id: Annotated[str, Argument(help="Id of the run")],
    store: StoreOption = DEFAULT_STORE,
    note: Annotated[str, Option(help="Why: kept with the decision")] = "",
    as_json: JsonOption = False,
) -> None:
    """Let a run go on that its early warning suspended, on the scores that were judged. Other scores ask again.

    Examples:
        cosmos-flows approve nft-1a2b3c4d
        cosmos-flows approve nft-1a2b3c4d --note "brighter, as the prompts ask for"
    """
    found = import_module("flows.warning.approve").approve(store, run_id, note)
    print_json(found.as_json()) if as_json else print_parts(*found.lines())
