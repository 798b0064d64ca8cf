"""The command of a run that is finished: nothing is left to make, so it needs neither a flow nor Prefect's server."""

from collections.abc import Callable, Sequence
from typing import NoReturn

from cosmos_rl_core.errors import counted
from cosmos_rl_core.storage import store
from cosmos_rl_core.storage.lease import Lease
from flows.devices import work_folders
from flows.operations.upgrades import settled
from flows.planning.base import AnyPlan, AnyRun
from flows.planning.plan import PLAN_FILE, Settings, freeze, run_url
from flows.planning.run import run_of
from flows.reporting.derived import Deriving
from flows.running.progress import read_progress
from flows.session.current_waves import CurrentWave, Ended, names_of
from flows.session.loop import make
from flows.terminal import commands
from flows.watching.judged import held_out_lines
from stages.artifacts.slots import one_look
from stages.reporting.contracts import Report

Note = Callable[[str], object]


class _UnfinishedError(Exception):
    """Something is left to make."""


def say_if_finished(plan: AnyPlan, settings: Settings, note: Note) -> bool:
    """Say what a finished run made, and return True; return False if its flow has something to make or to send.

    It is finished if every artifact is current, and so are its page and its numbers. Holds the run's lease meanwhile.
    Raises what the flow raises for a changed recipe, artifacts of other code and a run that another process works on.
    """
    url = run_url(settings.store, plan.run_id)
    if settings.remake or "wandb" in plan.recipe.logging.logger or store.size(store.join(url, PLAN_FILE)) is None:
        return False
    said = read_progress(url)
    if said is None or said.end != "done":
        return False
    run = run_of(freeze(plan, settings.store), settings.store)
    with Lease(store.join(url, "lease")) as lease:
        work_folders.remove_abandoned(url)
        run = settled(run, remake=False)
        commands.keep(run, settings)
        deriving, taken = Deriving(run), list[str]()

        def take(current: Sequence[CurrentWave], ended: Ended) -> None:
            told = [pair for one in current for pair in one.told]
            if not deriving.look(told):
                raise _UnfinishedError
            for one in current:
                lease.check()
                ended(one.wave, one.manifests)
            taken.append(line_of(current))

        try:
            make(run, _launch, take=take)
        except _UnfinishedError:
            return False
        note(f"run {plan.run_id}: {run.url}")
        note(f"report: {store.join(run.slots.report, Report.PAGE)}")
        note(taken[0])
        with one_look():
            say_end(run, settings, note)
    return True


def say_end(run: AnyRun, settings: Settings, note: Note) -> None:
    """Say which command trains a finished run further, and its held-out scores. Call it inside of ``one_look``."""
    if not settings.of_study:
        note(f"continue: {commands.to_run(settings, run.plan.run_id, 2 * run.recipe.train.num_iterations)}")
    for line in held_out_lines(run):
        note(line)


def line_of(current: Sequence[CurrentWave]) -> str:
    """Return the line about waves that are taken together."""
    return f"{names_of(current):<28} kept  {counted(len(current), 'wave')}, nothing to do"


def _launch(*_: object) -> NoReturn:
    raise _UnfinishedError
