"""How many samples a VAE takes at once."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import MediaShape
from stages.formats.samples import read_samples
from stages.generating import plans
from stages.generating.plans import vae_batches
from tests.stages.conftest import FEW_PROMPTS, make, make_run


def sizes(num_samples: int, height: int, width: int, frames: int) -> list[int]:
    """How many samples are in each part of a batch."""
    media = MediaShape(size=(height, width), frames=frames)
    parts = [list(range(num_samples))[part] for part in vae_batches(num_samples, media)]
    assert [place for part in parts for place in part] == list(range(num_samples))
    return [len(part) for part in parts]


def test_the_vae_takes_large_samples_one_by_one_and_small_ones_together():
    assert sizes(8, 720, 1280, 93) == [1] * 8
    assert (sizes(2, 480, 832, 5), sizes(2, 480, 832, 9)) == ([2], [1, 1])
    assert sizes(8, 1024, 1024, 1) == [8]
    assert sizes(3, 2048, 2048, 1) == [1] * 3
    assert sizes(1, 720, 1280, 93) == [1]


@pytest.mark.slow
def test_samples_decoded_one_by_one_are_the_same_up_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found: list[Any] = []
    for limit in (plans.VAE_SAMPLE_BYTES, 0):
        monkeypatch.setattr(plans, "VAE_SAMPLE_BYTES", limit)
        found.append(pictures(tmp_path / str(limit)))
    together, alone = found
    assert np.abs(together - alone).max() <= 1


def recipe(train_policy: dict[str, Any]) -> dict[str, Any]:
    """Two prompts, or two steps."""
    values: dict[str, Any] = {
        "policy": {
            "model_name_or_path": "package:tiny-sd3",
            "lora": {"r": 2, "target_modules": ["to_q"]},
            "diffusers": {"inference_size": [32, 64], "max_prompt_length": 12},
        },
        "train": {"num_iterations": 1, "train_batch_per_replica": 8, "train_policy": {"mini_batch": 4} | train_policy},
    }
    values["policy"]["diffusers"]["sample"] = {"num_steps": 2}
    values["rollout"] = {"n_generation": 4, "n_generation_mini_batch": 4, "samples_per_shard": 4}
    return values | {"rewards": [{"fn": {"name": "ocr"}}]}


def pictures(folder: Path) -> np.ndarray:
    """Return the pixels of a rollout: int ``[samples, frames, height, width, 3]``."""
    run = make_run(folder, recipe({"type": "nft", "batch_size_per_optimize": 4, "dataset": FEW_PROMPTS}))
    for request in (partial(requests.policy, run), lambda: run.prepared.embed, partial(requests.rollout, run, 0)):
        make(request(), folder)
    artifact = Artifact(input_of(run.slots.iteration(0, "rollout")))
    shards = list(read_samples(artifact))
    return np.stack([sample.pixels for sample in shards]).astype(int)
