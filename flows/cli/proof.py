"""Commands that prove what a run did."""

from importlib import import_module
from typing import Annotated

import typer
from typer import Argument, Option

from flows.cli.command import JsonOption, OwnExitCode, StoreOption, command, print_json, print_parts
from flows.defaults import DEFAULT_STORE

proof_app = typer.Typer()
WRONG_DATA = 65


@command(proof_app, "audit")
def audit(
    run_id: Annotated[str, Argument(metavar="RUN", help="Id of the run")],
    store: StoreOption = DEFAULT_STORE,
    iteration: Annotated[int | None, Option(min=0, help="Look at one iteration and at what it reads")] = None,
    head: Annotated[str | None, Option(help="Digest of a head that you kept: the run must still have it")] = None,
    quick: Annotated[bool, Option("--quick", help="Compare sizes only; read no media and no tensors")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare every byte of a run with its digest, and every digest with what names it. Changes nothing.

    Exits with 65 if anything is wrong, and prints file and field of each fault.

    Examples:
        cosmos-flows audit RUN
        cosmos-flows audit RUN --iteration 7 --quick
        cosmos-flows audit RUN --store s3://bucket/prefix --head 5d41402abc4b2a76b9719d911017c592ae2c3ab6
    """
    found = import_module("flows.auditing.audit").audit(store, run_id, iteration, head=head, quick=quick)
    print_json(found.as_json()) if as_json else print_parts(*found.lines())
    if found.faults:
        raise OwnExitCode(WRONG_DATA)
