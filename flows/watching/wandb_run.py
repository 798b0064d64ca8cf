"""Weights & Biases: the numbers of a run and some of its pictures, sent by a thread of its own."""

import importlib
import io
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from PIL import Image

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import first_line
from flows.planning.base import AnyRun
from flows.watching.metrics import Line
from stages.artifacts.files import read_entry
from stages.artifacts.manifest import Manifest
from stages.reporting.contracts import Fragment
from stages.reporting.excerpt import Excerpt, Picture

FINISH_TIMEOUT_S = 60
"""Seconds that the end of a run waits for wandb. The rest stays on the disk for `wandb sync`."""
LOGIN_TIMEOUT_S = 60
"""Seconds that wandb waits for a login at a terminal."""

Note = Callable[[str], None]


class Wandb:
    """One run on Weights & Biases; a resumed run continues it.

    A thread of its own talks to wandb, so that no stage waits for it. Rows that the server has are not sent again.
    Offline there is no server, so each folder holds the whole history. After any failure it warns once and sends
    nothing more; the run goes on.
    """

    def __init__(self, run: AnyRun, note: Note) -> None:
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
            row = {key: value for line in found for key, value in line.known}
            row.pop("stage")
            self._orders.put(partial(self._log, row, position))

    def show(self, line: Line, manifest: Manifest, config: Fragment) -> None:
        """Send pictures of a fragment: of held-out samples the same at every policy version, of a rollout typical ones.

        ``line`` is their position in the loop.
        """
        why, key = ("fixed", "val/pictures") if config.held_out else ("typical", "rollout/pictures")
        row = {"step": line.step, "policy_version" if config.held_out else "iteration": line.k}
        self._orders.put(partial(self._show, row, line.shown_at(held_out=config.held_out), manifest, (why, key)))

    def finish(self, *, failed: bool) -> None:
        """End the run on wandb, and wait for its thread: for a login, and for the upload."""
        self._orders.put(partial(self._finish, exit_code=int(failed)))
        self._orders.put(None)
        self._thread.join(LOGIN_TIMEOUT_S + 2 * FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._note("warning: wandb does not answer; what is missing there is in its local folder")

    def _start(self, run: AnyRun) -> None:
        self._run = _start(run)

    def _log(self, row: dict[str, Any], position: int) -> None:
        if position >= self._run.starting_step:
            self._run.log(row, step=position, commit=True)

    def _show(self, row: dict[str, Any], position: int, manifest: Manifest, shown: tuple[str, str]) -> None:
        if position < self._run.starting_step:
            return
        why, key = shown
        entry = manifest.files[Fragment.FRAGMENT]
        chosen = Excerpt.read(read_entry(manifest.slot, entry), entry.path).chosen(why)
        with tempfile.TemporaryDirectory(prefix="cosmos-wandb-") as folder:
            media = [_medium(manifest, one, Path(folder)) for one in chosen if one.full]
            if media:
                self._log(row | {key: media}, position)

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


def _start(run: AnyRun) -> Any:
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


def _medium(manifest: Manifest, picture: Picture, folder: Path) -> Any:
    """Return a picture or a video in full size as an object of wandb."""
    wandb: Any = importlib.import_module("wandb")
    data = read_entry(manifest.slot, manifest.files[picture.full])
    score = "" if picture.score is None else f" ({picture.score:.4g})"
    if not picture.is_video:
        return wandb.Image(Image.open(io.BytesIO(data)), caption=picture.prompt + score)
    path = folder / Path(picture.full).name
    path.write_bytes(data)
    return wandb.Video(str(path), caption=picture.prompt + score, format=path.suffix[1:])
