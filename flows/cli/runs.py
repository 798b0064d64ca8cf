"""Commands that list runs, show their logs, end and delete them."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from typer import Argument, Option

from cosmos_rl_core.errors import ConfigError
from flows.cli.command import (
    KEEP,
    LOOK,
    MAKE,
    WRONG_DATA,
    JsonOption,
    OwnExitCode,
    StoreOption,
    command,
    print_json,
    print_parts,
    say,
)
from flows.defaults import DEFAULT_STORE, STOP_WAIT_S

runs_app = typer.Typer()
RunArgument = Annotated[str, Argument(metavar="RUN", help="Id of the run")]


@command(runs_app, "runs", LOOK)
def runs(
    names: Annotated[list[str] | None, Argument(metavar="[RUN]...", help="Runs to compare; default: all")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """List the runs of a store: state, iterations, reward before and now, time left, device time.

    Of runs that are named, also the settings in which they differ from the first. Exit with 65 if one is damaged.

    Examples:
        cosmos-flows runs
        cosmos-flows runs nft-1a2b3c4d nft-5e6f7a8b
        cosmos-flows runs --store s3://bucket/prefix --json
    """
    show_runs(store, names or (), as_json=as_json)


def show_runs(store: str, names: Sequence[str] = (), *, as_json: bool) -> None:
    """Print runs, all or those that are named. End with the exit code for wrong data if one is damaged."""
    found = import_module("flows.library.lines").all_runs(store, names)
    damaged = [line.run for line in found if line.state == "damaged"]
    if as_json:
        print_json(found)
    else:
        shown = import_module("flows.watching.run_list")
        print_parts(*shown.rendered(found, store))
        if names and not damaged:
            print_parts(*shown.settings_that_differ(store, names))
    if damaged:
        raise OwnExitCode(WRONG_DATA)


@command(runs_app, "logs", LOOK)
def logs(
    run_id: RunArgument,
    stage: Annotated[str | None, Option(help="Print its newest log: a name that status shows, such as update")] = None,
    iteration: Annotated[int | None, Option(min=0, help="The iteration, or the policy version")] = None,
    attempt: Annotated[int | None, Option(min=1, help="With --stage: this attempt, from 1, not the newest")] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """List the logs of all attempts at the stages of a run, or print one.

    An attempt leaves its log in the store when it ends, whether it made its artifact or not.

    Examples:
        cosmos-flows logs nft-1a2b3c4d
        cosmos-flows logs nft-1a2b3c4d --stage update --iteration 7
        cosmos-flows logs nft-1a2b3c4d --stage rollout --iteration 7 --attempt 1
    """
    if attempt is not None and stage is None:
        raise ConfigError("--attempt is one of a stage: add --stage")
    module = import_module("flows.watching.logs")
    found = module.logs(store, run_id, stage, iteration)
    if as_json:
        print_json(found.as_json())
    elif stage is None:
        print_parts(*found.parts())
    else:
        say(module.text_of(found, attempt).rstrip())


@command(runs_app, "stop", MAKE)
def stop(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    wait: Annotated[float, Option(min=0, help="Seconds to wait for its end")] = STOP_WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """End a run at work, on whatever machine, by hand or under a Prefect worker. Its command continues it.

    What stands is kept, and what a stage has finished of its work. Exit with 75 if the run works on after --wait.

    Examples:
        cosmos-flows stop nft-1a2b3c4d
        cosmos-flows stop nft-1a2b3c4d --store s3://bucket/prefix --wait 600
    """
    found = import_module("flows.operations.stop").stop(store, run_id, wait)
    print_json(found) if as_json else print_parts(*found.lines())


@command(runs_app, "delete", KEEP)
def delete(
    run_id: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    yes: Annotated[bool, Option("--yes", help="Do not ask")] = False,
    dry_run: Annotated[bool, Option(help="Print what would be deleted; change nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a run and all its artifacts, for good. Refused while it works, and while another run reads it.

    Examples:
        cosmos-flows delete nft-1a2b3c4d --dry-run
        cosmos-flows delete nft-1a2b3c4d --yes
    """
    module = import_module("flows.garbage.delete")
    found = module.found(store, run_id)
    if not dry_run:
        if not yes:
            if not sys.stdin.isatty():
                raise ConfigError("nobody can be asked here: add --yes, or --dry-run to see what would be deleted")
            typer.confirm(f"{next(found.lines())}; delete it?", abort=True, err=True)
        found = module.delete(store, run_id)
    print_json(found) if as_json else print_parts(*found.lines())
