"""Preference of people for pictures of a prompt: PickScore, a CLIP ViT-H-14 trained on their choices."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.rewards._clip.scorers import H14, ClipOptions, ClipReward

DIVISOR = 26.0
"""Number by which flow_grpo and cosmos-rl's service divide the logit, so that scores are about 1."""


class Options(ClipOptions):
    """The PickScore model, and the tokenizer and image settings of the CLIP model that it was trained from."""

    facts = Facts(
        input="image",
        scores={"pickscore": "logit / 26; about 0.65 to 0.95"},
        source="Pick-a-Pic, arXiv:2305.01569, yuvalkirstain/PickScore_v1; divided by 26 as in flow_grpo",
        torch=True,
        batches=("batch_size",),
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["pickscore"] = "pickscore"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(default="yuvalkirstain/PickScore_v1", min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the model in the layout of transformers, or its name on the Hugging Face hub, ``owner/name`` or
    ``owner/name@revision``, which is in the local cache. Scores depend on its files, not on their path."""
    processor: UserPath | None = Field(default=H14, json_schema_extra=NOT_IDENTITY)
    """Folder or name with the tokenizer and the image settings."""


class Reward(ClipReward):
    """Score ``pickscore``: the model's logit of picture and prompt divided by 26, averaged over video frames."""

    def scores(self, cosine: float) -> dict[str, float]:
        """Return the scaled logit."""
        return {"pickscore": self._clip.logit_scale * cosine / DIVISOR}
