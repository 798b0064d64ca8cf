"""The command that signs a run."""

from pathlib import Path
from typing import Annotated

from typer import Option

from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE
from flows.heads import signatures


def sign(
    run_id: RunArgument,
    key: Annotated[Path, Option(help="PEM file with an ed25519 private key")],
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Sign the newest head of a run, and with it everything up to there. Audit the run first.

    Examples:
        cosmos-flows sign RUN --key key.pem
    """
    found = signatures.sign(store, run_id, key)
    print_found(found, [str(found)], as_json=as_json)
