"""The command that deletes a run."""

import sys
from typing import Annotated

import typer
from typer import Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.base.options import DryRunOption, JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE
from flows.garbage import delete as operation


def delete(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    yes: Annotated[bool, Option("--yes", help="Do not ask")] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a run and all its artifacts, for good. Refused while it works, and while another run reads it.

    Examples:
        cosmos-flows delete nft-1a2b3c4d --dry-run
        cosmos-flows delete nft-1a2b3c4d --yes
    """
    found = operation.found(store, run_id)
    if not dry_run:
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("no terminal to ask at: add --yes, or --dry-run to see what would be deleted")
            typer.confirm(f"{next(found.lines())}; delete it?", abort=True, err=True)
        found = operation.delete(store, run_id)
    print_found(found, found.lines(), as_json=as_json)
