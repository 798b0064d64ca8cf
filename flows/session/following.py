"""The followers of a run at work: its numbers, its page, Prefect, early warning."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

from cosmos_rl_core.errors import BudgetError
from cosmos_rl_core.imports import uncollected
from flows.ledger.budget import Budget
from flows.ledger.ledger import Ledger
from flows.planning.base import AnyRun
from flows.reporting.derived import Deriving
from flows.running import events
from flows.running.wave import Waves
from flows.session.current_waves import CurrentWave, Ended
from flows.session.observers import Observer, told
from flows.warning.gate import pass_gate
from stages.artifacts.files import read_once
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request

Tell = Callable[[Sequence[Request], Sequence[Manifest]], None]


def tell(
    observers: Sequence[Observer],
    deriving: Deriving,
    current: Sequence[CurrentWave],
    ended: Ended,
    check: Callable[[], None],
) -> None:
    """Tell observers of waves that are made already, in order. Call it inside of ``one_look``."""
    with uncollected():
        derived = deriving.look([pair for one in current for pair in one.told])
    # Numbers and pages are made from the same tables.
    with uncollected() if derived else nullcontext(), read_once():
        for one in current:
            check()
            told(observers, one.wave.name, one.requests, one.manifests)
            ended(one.wave, one.manifests)
        for observer in observers:
            if observer.taken is not None:
                observer.taken()


def _told(requests: Sequence[Request], manifests: Sequence[Manifest]) -> list[tuple[str, Manifest]]:
    return [(request.slot, manifest) for request, manifest in zip(requests, manifests, strict=True)]


def _derives(deriving: Deriving, done: Tell, passed: Tell, *, always: bool) -> Observer:
    """Return the observer that derives files. If they are current, it ignores current waves, unless ``always``."""

    def tell(_: str, asked: Sequence[Request], made: Sequence[Manifest]) -> None:
        if always or not deriving.current:
            passed(asked, made)

    return Observer(after=lambda _, asked, made: done(asked, made), passed=tell)


def _keeps_to_budget(run: AnyRun, ledger: Ledger) -> Observer:
    budget = Budget(run, ledger)

    def check(wave: str, requests: Sequence[Request]) -> None:
        try:
            budget.check(wave, requests)
        except BudgetError as error:
            events.budget_reached(run, str(error))
            raise

    return Observer(before=check)


@contextmanager
def observers_of(run: AnyRun, waves: Waves, deriving: Deriving) -> Iterator[list[Observer]]:
    """Yield the observers of a run, in the order in which they are told of a wave: numbers, report, Prefect, warnings.

    They leave numbers and report of a finished run as they are, if both are current.
    """
    # Imported here because it needs pandas, and Prefect imports this file again to cancel a flow run.
    tracking = importlib.import_module("flows.watching.tracking")
    writing = importlib.import_module("flows.reporting.writing")
    showing = importlib.import_module("flows.showing.showing")
    note = waves.display.note
    note(f"report: {writing.address(run)}, written after each iteration")
    with ExitStack() as open_ones:
        pages = open_ones.enter_context(writing.Pages(run, note))
        # Ends before the last page is drawn, which links its numbers.
        tracker = open_ones.enter_context(tracking.Tracker(run, note))
        board = showing.board_of(note)
        found = [] if waves.ledger is None else [_keeps_to_budget(run, waves.ledger)]
        found.append(Observer(after=lambda _, asked, made: deriving.add(_told(asked, made))))
        found.append(_derives(deriving, tracker.done, tracker.passed, always=tracker.sends))
        found.append(Observer(taken=tracker.taken))
        found.append(Observer(before=lambda *_: pages.begin()))
        # Prefect shows the facts that were collected for the page.
        found.append(_derives(deriving, pages.done, pages.passed, always=board is not None))
        if board is not None:
            shown = open_ones.enter_context(showing.Showing(run, pages.collected, board, note))
            waves.display.follow(shown)
            found.append(
                Observer(
                    after=lambda name, _, made: shown.ended(name, made),
                    passed=lambda name, _, made: shown.passed(name, made),
                )
            )
        found.append(Observer(after=lambda _, asked, made: events.policies_committed(run, waves.begun, made)))
        # Last, because it may stop the run.
        found.append(Observer(after=lambda name, asked, made: pass_gate(run, made, note)))
        yield found
        pages.rests, tracker.rests = deriving.current, deriving.current and not tracker.sends
        # Before the page is drawn for the last time: it may hold newer files than the record names, never older ones.
        deriving.close(pages.collected.listed)
    deriving.write(pages.finished, tracker.finished)
