"""The command that lets a suspended run go on."""

from typing import Annotated

from typer import Option

from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE
from flows.warning import approve as operation


def approve(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    note: Annotated[str, Option(help="Why: kept with the decision")] = "",
    as_json: JsonOption = False,
) -> None:
    """Let a run go on that its early warning suspended. This approves the scores that were judged; others ask again.

    Examples:
        cosmos-flows approve nft-1a2b3c4d
        cosmos-flows approve nft-1a2b3c4d --note "brighter, as the prompts ask for"
    """
    found = operation.approve(store, run_id, note)
    print_found(found, found.lines(), as_json=as_json)
