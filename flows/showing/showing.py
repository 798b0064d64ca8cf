"""A run in Prefect while it works: its table of iterations, progress, pictures and report, as artifacts."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Self

from prefect.context import FlowRunContext

from cosmos_rl_core.errors import first_line
from flows.defaults import served_report
from flows.ledger.pages import iteration_of
from flows.library.collected import Collected
from flows.planning.base import AnyRun
from flows.post_train import post_train
from flows.reporting.writing import address
from flows.running.progress import slowest_of
from flows.running.server import server_is_own
from flows.showing import contents
from flows.showing.board import Board, Shown
from stages.artifacts.manifest import Manifest
from stages.execution.outcome import Status

INTERVAL_S = 3.0
"""Seconds between two updates of the progress."""
SHARE = 20
"""The table and the pictures are made again only after this many times as long as making them took."""
ENDS = ("fragment", "finetune", "report")
"""Stages that end an iteration, the judgement of a policy, or the run."""


def board_of(note: Callable[[str], None]) -> Board | None:
    """Return the board of this flow run; None outside of one, and on a command's own server, which nobody looks at."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or server_is_own():
        return None
    return Board(context.flow_run.id, note)


class Showing:
    """The artifacts of a run on a board, from ``with`` to its end. Its failures end no run."""

    def __init__(self, run: AnyRun, collected: Collected, board: Board, note: Callable[[str], None]) -> None:
        self._run, self._collected, self._board, self._note = run, collected, board, note
        self._roles = contents.roles_of(run)
        self._places = {wave.name: place for place, wave in enumerate(post_train(run))}
        self._seconds: dict[int, float] = {}
        """Seconds of the stages of each iteration."""
        self._told_s = self._made_s = -float("inf")
        self._took_s = 0.0
        self._why = ""
        """The last failure that was noted."""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._board)
        words = contents.report_link(address(self._run), served_report(self._run.plan.run_id))
        self._put("report", Shown("markdown", words, f"Report of {self._run.plan.run_id}, after each iteration"))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._open:
            self._try(self._show)
            if error is None:
                self._progress(1.0, "finished")

    def working(self, wave: str, statuses: Sequence[Status]) -> None:
        """Move the progress to the slowest stage of a wave. Cheap enough to call many times a second."""
        now_s = time.monotonic()
        if now_s - self._told_s < INTERVAL_S or wave not in self._places:
            return
        self._told_s = now_s
        at = slowest_of(statuses)
        words = f"{wave}: {at.phase} {at.step}/{at.total}" if at.phase else wave
        self._progress((self._places[wave] + at.step / max(1, at.total)) / len(self._places), words)

    def done(self) -> None:
        """Do nothing: the next wave moves the progress."""

    def ended(self, wave: str, manifests: Sequence[Manifest]) -> None:
        """Show the table and the pictures after a wave that ends an iteration or the judgement of a policy."""
        self.passed(wave, manifests)
        ends = any(made.stage in ENDS for made in manifests)
        if ends and time.monotonic() - self._made_s > SHARE * self._took_s:
            self._try(self._show)

    def passed(self, wave: str, manifests: Sequence[Manifest]) -> None:
        """Count the seconds of a wave that was already current. It is shown with the wave that comes after it."""
        if (k := iteration_of(wave)) is not None:
            seconds = sum(float(made.summary.get("seconds") or 0.0) for made in manifests)
            self._seconds[k] = self._seconds.get(k, 0.0) + seconds

    def _show(self) -> None:
        began_s = time.monotonic()
        run_id = self._run.plan.run_id
        rows = contents.table(self._collected, self._roles, self._seconds)
        words = "the newest first; means of older ones; ± standard errors over prompts, where they are known"
        self._put("iterations", Shown("table", rows, f"Iterations of {run_id}, {words}"))
        if grid := contents.pictures(self._collected):
            self._put("pictures", Shown("markdown", grid, f"Samples of {run_id}"))
        self._made_s = time.monotonic()
        self._took_s = self._made_s - began_s

    def _progress(self, part: float, words: str) -> None:
        self._put("progress", Shown("progress", round(100.0 * part, 1), f"{self._run.plan.run_id}: {words}"))

    def _put(self, what: str, shown: Shown) -> None:
        self._board.put(contents.key_of(self._run.plan.run_id, what), shown)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a run goes on without its artifacts in Prefect
            why = f"{type(error).__name__}: {first_line(error)}"
            if why != self._why:
                self._note(f"the artifacts in Prefect are not up to date ({why})")
            self._why = why
