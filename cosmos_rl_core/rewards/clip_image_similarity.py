"""Similarity to the prompt's references by CLIP: the cosine of the embeddings of two pictures.

Source: CLIP-I of DreamBooth, arXiv:2208.12242, section 4.2.
"""

from typing import Literal

import numpy as np

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._clip.scorers import ClipOptions, ClipReward, unit


class Options(ClipOptions):
    """The CLIP model."""

    facts = Facts(
        scores={"clip_image_similarity": "cosine in [-1, 1]"},
        source="CLIP-I of DreamBooth, arXiv:2208.12242, section 4.2",
        torch=True,
        references="needed",
        batches=("batch_size",),
        evidence="tiny weights",
    )
    name: Literal["clip_image_similarity"] = "clip_image_similarity"  # pyright: ignore[reportIncompatibleVariableOverride]


class Reward(ClipReward):
    """Score ``clip_image_similarity``: the mean cosine over frames of a sample and references of its prompt."""

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return the scores of each sample, in order, or why it has none."""
        pictures = [Sample(s.sample_id, s.prompt_id, s.prompt, one) for s in samples for one in s.references]
        generated, shown = self._clip.images(samples), iter(self._clip.images(pictures))
        references = [[next(shown) for _ in sample.references] for sample in samples]
        return [_compared(*each) for each in zip(samples, generated, references, strict=True)]


def _compared(
    sample: Sample, frames: np.ndarray | Exception, references: list[np.ndarray | Exception]
) -> dict[str, float] | Exception:
    found = [frames, *references]
    if (wrong := next((one for one in found if isinstance(one, Exception)), None)) is not None:
        return wrong
    if not references:
        return ValueError(f"prompt {sample.prompt_id} has no reference to compare with")
    own, *others = (unit(one) for one in found if not isinstance(one, Exception))
    return {"clip_image_similarity": float(np.mean([own @ other.T for other in others]))}
