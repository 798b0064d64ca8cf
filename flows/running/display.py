"""The console of a run: a progress line while a stage works, one line when it is done."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

from rich import progress

from cosmos_rl_core.errors import visible
from flows.running.progress import Reporter, slowest_of
from flows.running.step_means import shown_of
from flows.terminal.console import can_redraw, console
from stages.artifacts.manifest import Manifest
from stages.execution.outcome import Status

Log = Callable[[str], None]


class Follower(Protocol):
    """An object that is told how a run goes."""

    def working(self, wave: str, statuses: Sequence[Status]) -> None:
        """Take notice of the progress of a wave. Called many times a second."""

    def done(self) -> None:
        """Take notice that a wave is done."""


class Display:
    """Progress bars on a terminal, plain lines elsewhere."""

    def __init__(self, log: Log | None = None, reporter: Reporter | None = None) -> None:
        """Print lines by ``log``, or on the console without it. ``reporter`` writes progress to the store."""
        self.console = console()
        self._log = log
        self._followers: list[Follower] = [] if reporter is None else [reporter]
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(30),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=self.console,
            transient=True,
            # Without a terminal, its end would print an empty line.
            disable=not can_redraw(self.console),
        )
        self._bar = self._progress.add_task("", visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def follow(self, follower: Follower) -> None:
        """Add a follower, which is told how the run goes."""
        self._followers.append(follower)

    def progress(self, name: str, statuses: Sequence[Status]) -> None:
        """Move the bar of a wave to the progress of its slowest stage."""
        for follower in self._followers:
            follower.working(name, statuses)
        slowest = slowest_of(statuses)
        words, step, total = f"{name:<28} {slowest.phase:<12}", slowest.step, max(slowest.total, 1)
        self._progress.update(self._bar, visible=True, description=words, completed=step, total=total)

    def done(self, name: str, manifests: Sequence[Manifest], *, skipped: bool) -> None:
        """Print one line for a finished wave: its seconds and the numbers of its artifacts.

        An update's numbers are means over its optimizer steps.
        """
        for follower in self._followers:
            follower.done()
        # The next wave begins.
        self._progress.reset(self._bar, visible=False)
        seconds = sum(float(manifest.summary.get("seconds") or 0) for manifest in manifests)
        # Two rewards both have a standard error: the stages of a wave are kept apart.
        texts = " | ".join(filter(None, (_numbers(manifest) for manifest in manifests)))
        self.note(f"{name:<28} {'kept' if skipped else f'{seconds:5.1f} s'}  {texts}")

    def note(self, message: str) -> None:
        """Print a line."""
        if self._log is None:
            self.console.print(message, soft_wrap=True)
        else:
            self._log(visible(message))


def _numbers(manifest: Manifest) -> str:
    """Return names and values of an artifact's numbers in words. Seconds are added up over the wave instead."""
    numbers = shown_of(manifest).items()
    return "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in numbers)
