"""Likeness of the frames of a video: the cosine of the CLIP embeddings of each frame and the next one.

A video without motion scores 1, so use it together with a reward for motion or contents.

Source: frame consistency of Gen-1, arXiv:2302.03011.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._clip.scorers import L14, ClipOptions, ClipReward
from cosmos_rl_core.rewards._embeddings import Embeddings, normalised


class Options(ClipOptions):
    """The CLIP model."""

    facts = Facts(
        input="video",
        scores={"frame_consistency": "cosine in [-1, 1]; 1 for a video without motion"},
        source="frame consistency of Gen-1, arXiv:2302.03011",
        torch=True,
        batches=("batch_size",),
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["frame_consistency"] = "frame_consistency"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(default=L14, min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the CLIP model in the layout of transformers, or its name on the Hugging Face hub, ``owner/name`` or
    ``owner/name@revision``, which is in the local cache. Scores depend on its files, not on their path."""


class Reward(ClipReward):
    """Score ``frame_consistency``: the mean cosine over pairs of consecutive frames."""

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        found = self._clip.images(samples)
        return [_consistency(sample, frames) for sample, frames in zip(samples, found, strict=True)]


def _consistency(sample: Sample, frames: Embeddings) -> dict[str, float] | Exception:
    if isinstance(frames, Exception):
        return frames
    if len(frames) < 2:
        return ValueError(f"sample {sample.sample_id} has 1 frame; frame_consistency compares the frames of a video")
    found = normalised(frames)
    return {"frame_consistency": float(np.mean((found[:-1] * found[1:]).sum(axis=1)))}
