"""Runs whose samples and scores are imagined, of any size: what fragments and pages are made from by the real code."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from cosmos_rl_core.config.early_warning import DEFAULTS, STATISTICS
from cosmos_rl_core.storage import media
from flows.planning.base import AnyRun
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import cut
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.contracts import METRICS
from stages.formats.samples import StoredSample, read_index, unit_files
from stages.formats.tables import to_parquet
from stages.generating.plans import plan_samples, row_of
from tests.flows.by_hand import make_one
from tests.hand_made import make
from tests.stages.conftest import make as make_stage

REAL = ("references", "warn", "fragment", "report")
"""Stages that run as they are."""
PICTURES = 12
"""Different pictures; samples share them, because encoding takes longer than all else."""


def picture(seed: int, size: int, frames: int = 1) -> tuple[str, bytes]:
    """A blurred picture with some noise, about as hard to compress as a photo; a video of it moving."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.asarray(coarse, np.int16) + rng.integers(-6, 7, (size, size, 3), np.int16)
    pixels = pixels.clip(0, 255).astype(np.uint8)
    return media.encode(np.stack([np.roll(pixels, 4 * frame, 1) for frame in range(frames)]))


class Imagined:
    """What the loop asks for. Rewards rise with the iterations; some samples have no score."""

    def __init__(self, run: AnyRun, folder: Path, *, size: int = 16, frames: int = 1, drift: float = 0.002) -> None:
        self.run, self.folder = run, folder
        self.pictures = [picture(seed, size, frames) for seed in range(PICTURES)]
        self.drift = drift
        """Change of contrast in an iteration."""
        self.done: Callable[[Any, Any], None] = lambda requests, manifests: None
        self.stop_at: dict[str, BaseException] = {}
        """Errors by the names of waves in which they are raised."""

    def launch(self, name: str, *requests: Request) -> list[Manifest]:
        """Make what is not current."""
        if (error := self.stop_at.get(name)) is not None:
            raise error
        found = [current_manifest(request) or self.made(request) for request in requests]
        self.done(requests, found)
        return found

    def made(self, request: Request) -> Manifest:
        """Make the artifact of a Request."""
        if request.stage in REAL:
            return make_stage(request, self.folder)
        if request.stage in ("rollout", "evaluate"):
            return make(request, self._samples(request), seconds=10.0)
        if request.stage == "reward":
            files = self.scores(request)
            return make(request, files, seconds=2.0)
        if request.stage == "update":
            return make(request, self.update(request), seconds=30.0, excluded=1)
        return make_one(request)

    def _samples(self, request: Request) -> dict[str, bytes]:
        config: Any = request.config
        plans = plan_samples(config.prompts, config.n_generation, request.seed, request.iteration)
        files: dict[str, bytes] = {}
        for number, unit in enumerate(cut(plans, config.samples_per_shard)):
            stored: list[StoredSample] = []
            for place, plan in enumerate(unit):
                shown = self.pictures[(plan.seed + place) % PICTURES]
                stored.append(StoredSample(row_of(plan) | {"metadata": {}, "finite": True}, *shown))
            files |= unit_files(number, stored)
        return files

    def scores(self, request: Request) -> dict[str, bytes]:
        """Files of scores."""
        index = read_index(Artifact(request.one("samples")))
        label, k = request.slot.rpartition("-")[2], request.iteration or 0
        rng = np.random.default_rng([k, len(label)])
        scores = rng.normal(0.5 + 0.004 * k * (label == "ocr"), 0.2, len(index)).clip(0, 1)
        valid = rng.random(len(index)) > 0.01
        valid[0] = True
        names = DEFAULTS if label == STATISTICS else {}
        # Contrast drifts with the policy, as it does when a reward is hacked.
        others = {name: rng.normal(0.4 + self.drift * k * (name == "contrast"), 0.1, len(index)) for name in names}
        others[label] = scores
        details = [json.dumps({name: float(some[i]) for name, some in others.items()}) for i in range(len(index))]
        table = pd.DataFrame({"sample_id": index["sample_id"], "prompt_id": index["prompt_id"], "valid": valid})
        table = table.assign(score=pd.Series(scores).where(pd.Series(valid)), scorer="imagined 1")
        errors = ["" if one else "TimeoutError: the scorer did not answer" for one in valid]
        said = pd.DataFrame({"sample_id": index["sample_id"], "error": errors, "details": details})
        return {contracts.Reward.SCORES: to_parquet(table), contracts.Reward.ANSWERS: to_parquet(said)}

    def update(self, request: Request) -> dict[str, bytes]:
        """Files of an update."""
        steps = request.settings(contracts.Update).steps
        rng = np.random.default_rng(request.iteration)
        numbers = range(steps.first_step, steps.first_step + len(steps.lrs))
        rows = [
            {"step": step, "loss": 2 + rng.normal() / 4, "kl": step * 1e-4, "grad_norm": rng.gamma(2.0), "lr": 1e-3}
            for step in numbers
        ]
        return {METRICS: to_parquet(pd.DataFrame(rows)), "current/w": b"%d" % steps.first_step, "old/w": b"old"}


def full_size(data: bytes) -> tuple[int, int]:
    """Width and height of a picture."""
    return Image.open(io.BytesIO(data)).size
