"""Similarity to the prompt's references by CLIP: the cosine of the embeddings of two pictures.

Source: CLIP-I of DreamBooth, arXiv:2208.12242, section 4.2.
"""

from typing import Literal

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._clip.scorers import ClipOptions, ClipReward
from cosmos_rl_core.rewards._embeddings import similarities


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
    """Score ``clip_image_similarity``: the mean cosine of a sample's frames with its prompt's references."""

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        found = similarities(self._clip, samples)
        return [one if isinstance(one, Exception) else {"clip_image_similarity": one} for one in found]
