"""Agreement of picture and prompt: the cosine of their CLIP embeddings."""

from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._clip import L14, Clip, ClipOptions
from cosmos_rl_core.rewards._facts import Facts


class Options(ClipOptions):
    """The CLIP model."""

    facts = Facts(
        input="image",
        scores={"clip_score": "cosine in [-1, 1]; about 0.1 to 0.35"},
        source="CLIPScore, arXiv:2104.08718, without its factor 2.5, its cut at 0 and its prefix of prompts",
        torch=True,
        also=("clipscore",),
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["clip_score"] = "clip_score"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: str = Field(default=L14, min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder of the CLIP model in the layout of transformers, or its name on the Hugging Face hub, ``owner/name`` or
    ``owner/name@revision``, which is in the local cache. Its files decide scores, not their place."""


class Reward:
    """Score ``clip_score``: the cosine of the embeddings of picture and prompt, averaged over video frames."""

    def __init__(self, options: Options) -> None:
        self._clip = Clip(options)

    @property
    def version(self) -> str:
        """Return the versions of the packages and the digest of the model's files."""
        return self._clip.version

    def check_prompt(self, text: str) -> str | None:
        """Return None: every prompt can be scored. Long ones are cut at the model's number of tokens."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return ``{"clip_score": cosine}`` for each sample, or why it cannot be scored, in order."""
        found = self._clip.cosines(samples)
        return [one if isinstance(one, Exception) else {"clip_score": one} for one in found]
