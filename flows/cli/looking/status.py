"""The command that shows the state of a run."""

from typing import Annotated

from typer import Argument, Option

from cosmos_rl_core.errors import ArtifactError, ConfigError, StageError, counted
from flows.cli.base.options import JsonOption, StoreOption
from flows.cli.base.printing import print_json
from flows.cli.looking.runs import show_runs
from flows.defaults import DEFAULT_STORE
from flows.library import open_run
from flows.terminal.commands import about
from flows.terminal.console import console
from flows.watching import status_table

WATCH = Option("--watch/--no-watch", help="Follow a run; exit with 70 if a stage is not finished")


def status(
    run_id: Annotated[str | None, Argument(help="Id of the run; default: list all")] = None,
    store: StoreOption = DEFAULT_STORE,
    watch: Annotated[bool | None, WATCH] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where a run is, how it goes on, its time left, cost, reward and report, and its stages.

    On a terminal, the command shows what fits and follows a running run; in a pipe it prints a table of every stage.
    Without an id, it lists the runs of the store. Exit with 65 if something is damaged.

    Examples:
        cosmos-flows status
        cosmos-flows status nft-1a2b3c4d --store s3://bucket/prefix --watch
        cosmos-flows status nft-1a2b3c4d --json
    """
    if as_json and watch:
        raise ConfigError("--json shows one moment: use it without --watch")
    if run_id is None:
        if watch:
            raise ConfigError("--watch follows one run: add its id")
        show_runs(store, as_json=as_json)
        return
    terminal = console()
    follows = not as_json and (terminal.is_terminal if watch is None else watch)
    overview = status_table.watch(store, run_id, terminal) if follows else open_run(run_id, store).now()
    if as_json:
        print_json(overview)
    elif not follows:
        status_table.show(overview, terminal)
    if overview.damage:
        audit = about(store, "audit", run_id)
        raise ArtifactError(f"{overview.damage}; `{audit}` lists every wrong byte")
    if watch and (left := len(overview.states) - overview.current):
        raise StageError(f"{run_id} is not complete: {counted(left, 'stage')} left to make")
