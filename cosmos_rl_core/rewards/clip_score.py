"""Agreement of picture and prompt: the cosine of their CLIP embeddings."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.rewards._clip.scorers import L14, ClipOptions, ClipReward


class Options(ClipOptions):
    """The CLIP model."""

    facts = Facts(
        input="image",
        scores={"clip_score": "cosine in [-1, 1]; about 0.1 to 0.35"},
        source="CLIPScore, arXiv:2104.08718, without its factor 2.5, its cut at 0 and its prefix of prompts",
        torch=True,
        batches=("batch_size",),
        also=("clipscore",),
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["clip_score"] = "clip_score"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(default=L14, min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the CLIP model in the layout of transformers, or its name on the Hugging Face hub, ``owner/name`` or
    ``owner/name@revision``, which is in the local cache. Scores depend on its files, not on their path."""


class Reward(ClipReward):
    """Score ``clip_score``: the cosine of the embeddings of picture and prompt, averaged over video frames."""

    def scores(self, cosine: float) -> dict[str, float]:
        """Return the cosine."""
        return {"clip_score": cosine}
