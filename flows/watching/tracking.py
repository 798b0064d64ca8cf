"""Write a run's ``metrics.jsonl`` and send its numbers to the console and wandb. Only damaged files fail the run."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ArtifactError, CosmosRLError, first_line
from cosmos_rl_core.storage import store
from flows.planning.run import Run
from flows.watching.metrics import FILE, Line, MetricsFile, steps_after, wave_lines
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request

FINISH_TIMEOUT_S = 60
"""Time that the end of a run waits for wandb. The rest stays on the disk for `wandb sync`."""
LOGIN_TIMEOUT_S = 60
"""Time that wandb waits for a login at a terminal."""

Note = Callable[[str], None]


class Tracker:
    """Follows a run: :meth:`done` is called after each wave, in the order of the loop."""

    def __init__(self, run: Run, note: Note) -> None:
        self._headline = run.headline_reward
        self._note = note
        self._steps = 0
        self._seen: set[str] = set()
        url = store.join(run.url, FILE)
        self._file = MetricsFile(url, self._try(partial(store.read_if_exists, url)) or b"")
        logger = run.recipe.logging.logger
        self._prints = "console" in logger
        self._wandb = Wandb(run, note) if "wandb" in logger else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._try(partial(self._file.write, whole=kind is None))
        if self._wandb is not None:
            self._wandb.finish(failed=kind is not None)

    def done(self, requests: Sequence[Request], manifests: Sequence[Manifest]) -> None:
        """Add the numbers of a wave. Writes the file after an update or an evaluation."""
        pairs = [pair for pair in zip(requests, manifests, strict=True) if pair[1].digest not in self._seen]
        self._seen |= {manifest.digest for _, manifest in pairs}
        trains = any(steps_after(request) is not None for request in requests)
        lines = self._try(partial(wave_lines, pairs, self._steps, self._headline)) or []
        self._steps = max(self._steps, *(steps_after(request) or 0 for request in requests))
        if not lines:
            return
        new = [line for line in lines if self._file.add(line.encode())]
        if trains or lines[-1].judges:
            self._try(self._file.write)
        if self._prints:
            for line in new:
                self._note(f"  {'  '.join(_shown(key, value) for key, value in _items(line))}")
        if self._wandb is not None:
            self._wandb.log(lines)

    def _try(self, action: Callable[[], Any]) -> Any:
        """Return the action's result; warn and return None if the store does not answer.

        Raises :class:`ArtifactError` if a table is damaged.
        """
        try:
            return action()
        except ArtifactError:
            raise
        except CosmosRLError as error:
            advice = "the same command again completes it"
            self._note(f"warning: {FILE} is not complete; {advice}: {error}")
            return None


class Wandb:
    """One run on Weights & Biases; a resumed run continues it.

    A thread of its own talks to wandb, so that no stage waits for it. Rows that the server has are not sent again.
    Offline there is no server, so each folder holds the whole history. After any failure it warns once and sends
    nothing more; the run goes on.
    """

    def __init__(self, run: Run, note: Note) -> None:
        self._note = note
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._run: Any = None
        self._broken = False
        self._orders.put(partial(self._start, run))
        self._thread = Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()

    def log(self, lines: Sequence[Line]) -> None:
        """Send a row for each position in the loop."""
        for position, found in groupby(lines, attrgetter("position")):
            row = {key: value for line in found for key, value in _items(line)}
            row.pop("stage")
            self._orders.put(partial(self._log, row, position))

    def finish(self, *, failed: bool) -> None:
        """Wait for the upload, at most ``FINISH_TIMEOUT_S``."""
        self._orders.put(partial(self._finish, exit_code=int(failed)))
        self._orders.put(None)
        self._thread.join(LOGIN_TIMEOUT_S + 2 * FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._note("warning: wandb does not answer; what is missing there is in its local folder")

    def _start(self, run: Run) -> None:
        self._run = _start(run)

    def _log(self, row: dict[str, Any], position: int) -> None:
        if position >= self._run.starting_step:
            self._run.log(row, step=position, commit=True)

    def _finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)

    def _work(self) -> None:
        """Carry out orders, the oldest first, until one fails."""
        while (order := self._orders.get()) is not None:
            if self._broken:
                continue
            try:
                order()
            except Exception as error:  # errors of wandb's service process have no common base
                self._broken = True
                hint = "; install the extra `tracking`" if isinstance(error, ImportError) else ""
                why = f"{type(error).__name__}: {first_line(error)}"
                self._note(f"warning: nothing more goes to wandb ({why}){hint}")


def _shown(key: str, value: Any) -> str:
    return f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"


def _items(line: Line) -> list[tuple[str, Any]]:
    """Return the values of a line that are not missing."""
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
        # Without URLs and launch options, so without secrets.
        config=run.recipe.identity(),
        # Our own lines go to the console.
        settings=wandb.Settings(console="off", finish_timeout=FINISH_TIMEOUT_S),
    )
    started.define_metric("step")
    started.define_metric("*", step_metric="step")
    return started
