"""Samples with which scorers are tested, equal on every machine."""

from typing import Any

import numpy as np

from cosmos_rl_core.rewards._base import Sample

SIDE, FRAMES = 224, 8
"""Side of a picture in pixels, and frames of a video."""
BLOCKS = 7
"""Coloured blocks along a side."""
METADATA: dict[str, Any] = {"tag": "single_object", "include": [{"class": "stop sign", "count": 1}]}
"""Metadata of a prompt of GenEval; other scorers do not read it."""


def trial_samples(kind: str, count: int) -> list[Sample]:
    """Return ``count`` samples of one size with different random blocks of colour: videos if ``kind`` is ``video``.

    The reference of each is the first frame of the next one; scorers that take no references do not read it.
    """
    rng, frames = np.random.default_rng(0), FRAMES if kind == "video" else 1
    blocks = rng.integers(0, 256, (count, frames, BLOCKS, BLOCKS, 3), np.uint8)
    pictures = blocks.repeat(SIDE // BLOCKS, axis=2).repeat(SIDE // BLOCKS, axis=3)
    texts = [f'a sign that says "test {i}"' + " in red" * (i % 3) for i in range(count)]
    names = [f"test-{i}" for i in range(count)]
    return [
        Sample(names[i], names[i], texts[i], pictures[i], metadata=METADATA, references=(pictures[i - count + 1, :1],))
        for i in range(count)
    ]
