"""Follow a run: keep its ``metrics.jsonl``, tell the loggers of the recipe. Nothing here fails a run but damage."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import Any, Protocol, Self

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.storage import store
from flows.planning.run import Run
from flows.watching.metrics import FILE, Line, MetricsFile, lines_of, steps_after
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request

FINISH_TIMEOUT_S = 60
"""How long the end of a run waits for wandb; what is not sent by then stays on the disk, for `wandb sync`."""
LOGIN_TIMEOUT_S = 60
"""How long wandb waits at a terminal for somebody to log in."""

Note = Callable[[str], None]


class Logger(Protocol):
    """Somebody who is told the numbers."""

    def log(self, lines: Sequence[Line], new: Sequence[Line]) -> None:
        """The lines of one wave, in order, and those of them that ``metrics.jsonl`` did not have yet."""
        ...

    def finish(self, *, failed: bool) -> None:
        """The run is over, or given up for now."""
        ...


class Tracker:
    """Is told of every wave that stands, in the order of the loop."""

    def __init__(self, run: Run, note: Note) -> None:
        self._headline = run.headline_reward
        self._note = note
        self._steps = 0
        self._seen: set[str] = set()
        url = store.join(run.url, FILE)
        self._file = MetricsFile(url, self._try(partial(store.read_if_exists, url)) or b"")
        logger = run.recipe.logging.logger
        self._loggers: list[Logger] = [Console(note)] if "console" in logger else []
        self._loggers += [Wandb(run, note)] if "wandb" in logger else []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._try(self._file.finish if kind is None else self._file.write)
        for logger in self._loggers:
            logger.finish(failed=kind is not None)

    def done(self, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
        """Take up the numbers of a wave; the file is written where an update or an evaluation is done."""
        # What a wave makes beside an update is of the policy before it.
        wave = sorted(zip(requests, manifests, strict=True), key=lambda pair: steps_after(pair[0]) is not None)
        lines: list[Line] = []
        for request, manifest in wave:
            if manifest.digest in self._seen:
                continue
            self._seen.add(manifest.digest)
            found = self._try(lambda r=request, m=manifest: list(lines_of(r, m, self._steps, self._headline))) or []
            beside = request is not wave[-1][0] and steps_after(wave[-1][0]) is not None
            lines += [replace(line, beside=beside) for line in found]
            self._steps = steps_after(request) or self._steps
        if not lines:
            return
        new = [line for line in lines if self._file.add(line.encode())]
        if lines[-1].judges or any(steps_after(request) is not None for request in requests):
            self._try(self._file.write)
        for logger in self._loggers:
            logger.log(lines, new)

    def _try(self, action: Callable[[], Any]) -> Any:
        """The action's result; None, and a warning, where the store does not answer. A damaged table passes."""
        try:
            return action()
        except ArtifactError:
            raise
        except CosmosRLError as error:
            self._note(f"warning: {FILE} is not complete; the same command again completes it: {error}")
            return None


class Console:
    """Prints what is new."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def log(self, lines: Sequence[Line], new: Sequence[Line]) -> None:
        """A line each."""
        for line in new:
            shown = (
                f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}" for key, value in _items(line)
            )
            self._note(f"  {'  '.join(shown)}")

    def finish(self, *, failed: bool) -> None:
        """Nothing is left to say."""


class Wandb:
    """One run on Weights & Biases, the same one when the run goes on.

    What the server has is not sent again; wandb offline knows no server, so each of its folders is a whole history.
    Where anything fails, that is said once, nothing more is sent, and the run goes on.
    """

    def __init__(self, run: Run, note: Note) -> None:
        self._note = note
        self._run: Any = None
        self._run = self._try(partial(_start, run))

    def log(self, lines: Sequence[Line], new: Sequence[Line]) -> None:
        """Rows at the lines' positions in the loop, those of one position together."""
        for position, found in groupby(lines, attrgetter("position")):
            if self._run is not None and position >= self._run.starting_step:
                row = {key: value for line in found for key, value in _items(line) if key != "stage"}
                self._try(partial(self._run.log, row, step=position, commit=True))

    def finish(self, *, failed: bool) -> None:
        """Wait for the upload, but not for long."""
        if self._run is not None:
            self._try(partial(self._run.finish, exit_code=int(failed)))

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # those of wandb's own service process have no base in common
            self._run = None
            hint = "; install the extra `tracking`" if isinstance(error, ImportError) else ""
            self._note(f"warning: nothing more goes to wandb ({type(error).__name__}: {_first_line(error)}){hint}")
            return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _items(line: Line) -> list[tuple[str, Any]]:
    """What there is of a line."""
    return [(key, value) for key, value in line.values.items() if value is not None]


def _start(run: Run) -> Any:
    wandb: Any = importlib.import_module("wandb")
    logging = run.recipe.logging
    wandb.setup(wandb.Settings(login_timeout=LOGIN_TIMEOUT_S))
    started = wandb.init(
        project=logging.project_name,
        group=logging.group_name,
        name=logging.experiment_name or run.plan.run_id,
        id=digest([run.url, run.plan.run_id])[:16],
        resume="allow",
        reinit="create_new",
        # Where and how it runs is not in it, and so no token either.
        config=run.recipe.identity(),
        # The console is ours.
        settings=wandb.Settings(console="off", finish_timeout=FINISH_TIMEOUT_S),
    )
    started.define_metric("step")
    started.define_metric("*", step_metric="step")
    return started
