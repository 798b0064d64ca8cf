"""The command that compares a run with its digests."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from flows.cli.base.command import WRONG_DATA, OwnExitCode
from flows.cli.base.options import JsonOption, RunArgument, StoreOption
from flows.cli.base.printing import print_found
from flows.defaults import DEFAULT_STORE
from flows.heads import signatures


def audit(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    iteration: Annotated[
        int | None, Option(min=0, help="Look at one iteration or policy version, and what it reads")
    ] = None,
    head: Annotated[
        str | None, Option(help="Digest of a head that you kept, 64 digits: the run must still have it")
    ] = None,
    public_key: Annotated[Path | None, Option(help="PEM file: its owner must have signed a head")] = None,
    quick: Annotated[bool, Option("--quick", help="Compare sizes only; read no media and no tensors")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare every byte of a run with its digest, and every digest with what names it. Changes nothing.

    Exits with 0 if nothing is wrong; else with 65, and prints file and field of each fault.
    The last lines name the newest head, whose digest to keep, and what retention deleted.

    Examples:
        cosmos-flows audit RUN
        cosmos-flows audit RUN --iteration 7 --head DIGEST
        cosmos-flows audit RUN --public-key public.pem
    """
    key = None if public_key is None else signatures.public_key(public_key)
    auditing: Any = import_module("flows.auditing.audit")  # reads tables with pandas
    found = auditing.audit(store, run_id, iteration, head=head, signed_by=key, quick=quick)
    print_found(found, found.lines(), as_json=as_json)
    if found.faults:
        raise OwnExitCode(WRONG_DATA)
