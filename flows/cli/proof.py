"""Commands that prove what a run did, and compare it with another."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from flows.cli.command import (
    PROVE,
    WRONG_DATA,
    JsonOption,
    OwnExitCode,
    StoreOption,
    command,
    print_json,
    print_parts,
    say,
)
from flows.defaults import DEFAULT_STORE

proof_app = typer.Typer()


@command(proof_app, "audit", PROVE)
def audit(
    run_id: Annotated[str, Argument(metavar="RUN", help="Id of the run")],
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
    key = None if public_key is None else import_module("flows.heads.signatures").public_key(public_key)
    auditing: Any = import_module("flows.auditing.audit")
    found = auditing.audit(store, run_id, iteration, head=head, signed_by=key, quick=quick)
    print_json(found.as_json()) if as_json else print_parts(*found.lines())
    if found.faults:
        raise OwnExitCode(WRONG_DATA)


@command(proof_app, "sign", PROVE)
def sign(
    run_id: Annotated[str, Argument(metavar="RUN", help="Id of the run")],
    key: Annotated[Path, Option(help="PEM file with an ed25519 private key")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Sign the newest head of a run, and with it everything up to there. Audit the run first.

    Examples:
        cosmos-flows sign RUN --key key.pem
    """
    say(import_module("flows.heads.signatures").sign(store, run_id, key))


@command(proof_app, "replay", PROVE)
def replay(
    run_id: Annotated[str, Argument(metavar="RUN", help="Id of the run")],
    stage: Annotated[str, Option(help="Name in `cosmos-flows status`: rollout, reward-ocr, update, export ...")],
    iteration: Annotated[int | None, Option(min=0, help="The iteration, or the policy version")] = None,
    samples: Annotated[str | None, Option(help="Compare these samples only: ids with commas between")] = None,
    cluster: Annotated[str | None, Option(help="Profile of another machine, instead of the run's")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Make a stage again in a scratch place and compare it with its artifact. The run is only read.

    Under equal numerics every bit must be equal; under others, numbers must be within tolerances. Exits with 65 if
    something differs, and prints file, sample, tensor and by how much.

    Examples:
        cosmos-flows replay RUN --stage update --iteration 7
        cosmos-flows replay RUN --stage rollout --iteration 7 --samples ID,ID
    """
    launch = None if cluster is None else import_module("cosmos_rl_core.recipes.reading").launch_of(cluster)
    wanted = () if samples is None else tuple(filter(None, samples.split(",")))
    replaying: Any = import_module("flows.auditing.replay")
    found = replaying.replay(store, run_id, stage, iteration, launch=launch, samples=wanted)
    print_json(found.as_json()) if as_json else print_parts(*found.lines())
    if not found.equal:
        raise OwnExitCode(WRONG_DATA)


@command(proof_app, "diff", PROVE)
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
    found: Any = import_module("flows.comparing.comparison").compare(run_a, run_b, store)
    print_json(found.as_json()) if as_json else print_parts(*found.parts())
    if html is not None:
        say(import_module("flows.comparing.page").write_page(found, str(html)), err=as_json)
