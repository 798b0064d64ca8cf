"""Runs made by hand as in ``by_hand``, with the numbers that their artifacts would have, and followed by a tracker."""

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.storage import media, store
from flows.planning.plan import METRICS_FILE
from flows.planning.run import Run
from flows.session import loop
from flows.watching.tracking import Tracker
from stages import contracts
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.contracts import METRICS
from stages.formats.tables import to_parquet
from stages.reporting.contracts import Fragment
from stages.reporting.excerpt import Excerpt, Picture
from tests.flows.by_hand import SECONDS, make_one
from tests.hand_made import make

STEPS = (0.5, 0.25)
"""Losses of the two optimizer steps of an iteration."""
SUMMARIES = {
    "rollout": {"samples": 8},
    "update": {"excluded": 1},
    "reward": {"standard_error": 0.125, "scored": 7, "failed": 1},
    "validate": {"loss": 0.375, "standard_error": 0.25, "items": 4},
}


def make_with_numbers(request: Request, raised_by: float = 0.0) -> Manifest:
    """Make a Request's artifact with the numbers that it would have."""
    if request.stage == "fragment":
        return make(request, fragment_files(request))
    if request.stage not in ("rollout", "reward", "update", "finetune", "validate"):
        return make_one(request)
    files = {"current/w": request.slot.encode(), "old/w": b"old", "scores": f"{raised_by}".encode()}
    if request.stage in ("update", "finetune"):
        first = request.config.model_dump()["steps"]["first_step"]
        rows = [{"step": first + i, "grad_norm": 1.0, "lr": 1e-3, "loss": loss} for i, loss in enumerate(STEPS)]
        if request.config.model_dump()["algorithm"]["type"] == "grpo":
            rows = [row | {"policy_loss": 0.5, "kl": 0.25, "ratio": 1.0, "clipped": 0.0} for row in rows]
        files[METRICS] = to_parquet(pd.DataFrame(rows))
    if request.stage == "update":
        rewards = [0.0, 1.0, None]
        table = {"reward": rewards, "reward.ocr": rewards, "advantage": [-1.0, 1.0, None], "used": [True, True, False]}
        files[contracts.Update.ADVANTAGES] = to_parquet(pd.DataFrame(table))
    said: dict[str, Any] = {**SUMMARIES.get(request.stage, {}), "seconds": SECONDS[request.stage]}
    if request.stage == "reward":
        said[request.slot.rpartition("-")[2]] = 0.5 + raised_by
    return make(request, files, **said)


def fragment_files(request: Request) -> dict[str, bytes]:
    """A fragment that shows a picture and a video of a policy version, and nothing of a rollout."""
    config = request.settings(Fragment)
    if not config.held_out:
        return {Fragment.FRAGMENT: Excerpt(k=request.iteration or 0).encode()}
    pixels = np.full((4, 16, 16, 3), 50 * (request.iteration or 0), np.uint8)
    files = {"full/a.png": media.encode(pixels[:1])[1], "full/b.mp4": media.playable(pixels)}
    shown = {name[5]: Picture(sample=name[5], prompt="a dog", seed=1, score=0.5, full=name) for name in files}
    excerpt = Excerpt(k=request.iteration or 0, pictures=shown, shown={"fixed": ("a", "b"), "worst": ("b",)})
    return {Fragment.FRAGMENT: excerpt.encode(), **files}


class Killed(BaseException):
    """SIGKILL, as far as a test can be killed."""


class Waves:
    """What the loop is given in place of processes; it dies when it comes to a wave of the name ``until``."""

    def __init__(self, tracker: Tracker, until: str = "") -> None:
        self.tracker, self.until = tracker, until
        self.names: list[str] = []

    def launch(self, name: str, *requests: Request) -> list[Manifest]:
        """Make what is not current, and tell the tracker."""
        if name == self.until:
            raise Killed
        self.names.append(name)
        manifests = [current_manifest(request) or make_with_numbers(request) for request in requests]
        self.tracker.done(requests, manifests)
        return manifests


def go(run: Run, notes: list[str] | None = None) -> list[str]:
    """Take a run to its end; the names of its waves."""
    with Tracker(run, [].append if notes is None else notes.append) as tracker:
        waves = Waves(tracker)
        loop.make(run, waves.launch)
    return waves.names


def go_until(run: Run, wave: str) -> None:
    """Take a run as far as to that wave, and kill it."""
    with pytest.raises(Killed):
        loop.make(run, Waves(Tracker(run, [].append), wave).launch)


def stored(run: Run) -> bytes:
    """The file's bytes."""
    return store.read(store.join(run.url, METRICS_FILE))


def rows(run: Run) -> list[dict[str, Any]]:
    """The file, line by line."""
    return [json.loads(line) for line in stored(run).splitlines()]


def logging_to(recipe: Any, *loggers: str) -> str:
    """Path of the recipe with these loggers."""
    return recipe(("[rollout]", f"[logging]\nlogger = {json.dumps(loggers)}\n\n[rollout]"))
