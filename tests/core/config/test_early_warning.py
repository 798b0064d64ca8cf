"""Limits that recipes without limits of their own have."""

import math
from dataclasses import replace

import numpy as np
import pytest

from cosmos_rl_core.config.early_warning import DEFAULTS
from cosmos_rl_core.datasets import rendered_text
from cosmos_rl_core.estimates.estimate import Estimate, mean_of
from cosmos_rl_core.rewards._base import Sample
from tests.core.rewards.test_pixel_statistics import score


def signs(seed: int) -> list[Sample]:
    """Signs like the demo's, twelve of each of eight words."""
    options = rendered_text.Options()
    rng = np.random.default_rng(seed)
    words = rng.choice(rendered_text.words(options), 8, replace=False)
    drawn = [(f"{word}-{n}", word, rendered_text.draw(word, options, rng)) for word in words for n in range(12)]
    return [Sample(name, word, "", picture[None]) for name, word, picture in drawn]


def exceeded(now: list[Sample], first: list[Sample]) -> set[str]:
    """The statistics that exceed their default limits."""

    def estimates(samples: list[Sample]) -> dict[str, Estimate]:
        found = [one for one in score(samples) if isinstance(one, dict)]
        prompts = [sample.prompt_id for sample in samples]
        return {name: mean_of([one[name] for one in found], prompts) for name in found[0]}

    before, after = estimates(first), estimates(now)
    drift = {name: after[name].minus(before[name]).in_errors for name in DEFAULTS if name in before}
    return {
        name
        for name, moved in drift.items()
        if moved > DEFAULTS[name].get("rise", math.inf) or -moved > DEFAULTS[name].get("fall", math.inf)
    }


def patched(samples: list[Sample], side: int, share: float) -> list[Sample]:
    """Samples whose upper left corner is moved by a share of the way to pure red."""
    found: list[Sample] = []
    for sample in samples:
        pixels = sample.pixels.astype(float)
        corner = pixels[0, :side, :side]
        pixels[0, :side, :side] = corner + share * (np.array([255, 0, 0]) - corner)
        found.append(replace(sample, pixels=pixels.round().astype(np.uint8)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_default_limits_find_a_patch_in_a_corner_and_leave_other_signs_alone(seed: int):
    first, now = signs(2 * seed), signs(2 * seed + 1)
    assert exceeded(now, first) == set()
    for side in (8, 4):
        assert exceeded(patched(now, side, 0.3), first) == {"border_deviation"}
    # Much smaller than a block, which has 4 x 8 pixels here.
    assert exceeded(patched(now, 2, 0.3), first) == set()
