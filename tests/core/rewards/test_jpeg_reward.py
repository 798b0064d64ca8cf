import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards.jpeg import Options, Reward


def sample(pixels: np.ndarray) -> Sample:
    return Sample("a-000", "a", "a prompt", pixels)


def test_the_score_is_minus_the_kilobytes_of_the_jpeg():
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels[0]).save(buffer, format="JPEG", quality=80)
    kilobytes = len(buffer.getvalue()) / 1000
    others = {"jpeg_incompressibility": kilobytes, "jpeg_compressibility": -kilobytes / 500}
    assert Reward(Options(quality=80)).score([sample(pixels)]) == [{"jpeg": -kilobytes, **others}]


@pytest.mark.parametrize("score", ["jpeg", "jpeg_compressibility", "jpeg_incompressibility"])
def test_the_named_score_decides_direction_and_scale(score: Any):
    pixels = np.random.default_rng(0).integers(0, 256, (1, 16, 24, 3), dtype=np.uint8)
    (default,), (named,) = (Reward(o).score([sample(pixels)]) for o in (Options(), Options(score=score)))
    assert isinstance(default, dict)
    assert named == default | {"jpeg": default[score]}


def test_the_default_direction_keeps_the_identity_that_recipes_have():
    assert Options().identity() == Options(score="jpeg").identity() == {"name": "jpeg", "quality": 95}


def test_a_video_scores_the_mean_of_its_frames_and_flat_beats_noisy():
    flat = np.full((1, 32, 32, 3), 128, np.uint8)
    noisy = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    both = np.concatenate([flat, noisy])
    results = Reward(Options()).score([sample(flat), sample(noisy), sample(both)])
    a, b, mean = (result["jpeg"] for result in results if isinstance(result, dict))
    assert a > b
    assert mean == (a + b) / 2
