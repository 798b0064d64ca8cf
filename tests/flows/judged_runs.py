"""Runs whose policies have known held-out losses and scores."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from flows.library.best import best_of
from flows.library.states import states
from flows.planning.base import AnyRun
from flows.planning.run import Run
from flows.session import loop
from stages import contracts
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest
from stages.formats.tables import to_parquet
from tests.flows.by_hand import SFT, SMALL_SFT, validated
from tests.flows.tracked import make_with_numbers
from tests.hand_made import make, planned

SECOND_REWARD = "rewards=[{ role = 'monitor', fn = { name = 'jpeg' } }]"
NO_REWARD = "rewards=[]"
ONE_EACH = {"export": {"lora/model.safetensors": b"weights", "lora/adapter_config.json": b"{}"}}
TWO_AND_A_GATE = """rewards=[
    { fn = { name = "ocr", line_width = 96 } },
    { weight = 0.5, fn = { name = "jpeg" } },
    { role = "gate", min = 0.5, fn = { name = "pixel_statistics" } },
]"""
HELD_OUT: dict[str, list[list[float | None]]] = {
    "ocr": [[0.2, 0.2, 0.2, 0.2], [0.9, 0.9, 0.9, 0.9], [0.5, 0.7, 1.0, None]],
    "jpeg": [[0.0, 0.0, 0.0, 0.0], [-2.0, -2.0, -2.0, -2.0], [0.0, 0.0, 0.0, 0.0]],
    "pixel_statistics": [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]],
}
"""Scores of four held-out samples of three policy versions, by the reward."""


def run_of(tmp_path: Path, *overrides: str, iterations: int = 4) -> Run:
    """A supervised run of two optimizer steps an iteration, called ``hand``."""
    return planned(SFT, tmp_path, run_id="hand", iterations=iterations, overrides=(*SMALL_SFT[1:], *overrides))


def make_with(run: Run, numbers: dict[int, float | None], until: str = "") -> list[str]:
    """Take the run to its end or to a wave; held-out losses or scores by policy version. Return the waves' names."""
    names: list[str] = []

    def one(request: Request) -> Manifest:
        found = numbers.get(request.iteration or 0)
        named = {"validate": "loss", "reward": request.slot.rpartition("-")[2]}.get(request.stage)
        files = ONE_EACH.get(request.stage, {"current/w": request.slot.encode()})
        if request.stage == "evaluate":
            files = {"media/00000.tar": b"", "index/00000.json": b""}
        summary: dict[str, Any] = {named: found} if named else {}
        if request.stage == "reward":
            summary["scored"] = 4
        return make(request, files, seconds=1.0, **summary)

    def launch(name: str, *requests: Request) -> list[Manifest]:
        names.append(name)
        if name == until:
            raise KeyboardInterrupt
        return [current_manifest(request) or one(request) for request in requests]

    loop.make(run, launch)
    return names


def best(run: AnyRun) -> Any:
    found = best_of(run, states(run))
    return found and (found.k, found.by, found.figure)


def judged_by(recipe: Any, tmp_path: Path, best_by: str) -> Run:
    """A run with two rewards and a gate, whose versions have the scores above."""
    asked = (f"validation.best_by={best_by}",) if best_by else ()
    path = validated(recipe, tmp_path, freq=1)
    run = planned(path, tmp_path, run_id=f"by-{best_by or 'default'}", overrides=(TWO_AND_A_GATE, *asked))

    def launch(name: str, *wanted: Request) -> list[Manifest]:
        return [current_manifest(request) or one(request) for request in wanted]

    def one(request: Request) -> Manifest:
        stage, _, label = request.slot.rpartition("/")[2].partition("-")
        if stage != "evaluate" or not label:
            return make_with_numbers(request)
        scores = HELD_OUT[label][request.iteration or 0]
        valid = [score is not None for score in scores]
        table = pd.DataFrame({"sample_id": [*"abcd"], "prompt_id": [*"ppqq"], "score": scores, "valid": valid})
        mean = fmean(score for score in scores if score is not None)
        files = {contracts.Reward.SCORES: to_parquet(table), contracts.Reward.ANSWERS: b"", "calls": b""}
        return make(request, files, **{label: mean, "scored": sum(valid), "seconds": 1.0})

    loop.make(run, launch)
    return run
