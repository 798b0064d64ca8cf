"""Preference of people for pictures of a prompt: HPSv2, a CLIP ViT-H-14 trained on their rankings."""

import html
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal

import ftfy
import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._clip.scorers import H14, Clip, ClipOptions, ClipReward


class Options(ClipOptions):
    """The HPSv2 model, and the tokenizer and image settings of the CLIP model that it was trained from."""

    facts = Facts(
        input="image",
        scores={"hpsv2": "cosine in [-1, 1]; about 0.2 to 0.35"},
        source="HPS v2, arXiv:2306.09341, xswu/HPSv2; version 2.0 or 2.1, as the prepared file has it",
        torch=True,
        batches=("batch_size",),
        evidence="tiny weights",
        names_checked=True,
    )
    name: Literal["hpsv2"] = "hpsv2"  # pyright: ignore[reportIncompatibleVariableOverride]
    model: UserPath = Field(min_length=1, json_schema_extra=NOT_IDENTITY)
    """Folder that ``cosmos-flows reward-service prepare hpsv2`` wrote from the published ``HPS_v2_compressed.pt`` or
    ``HPS_v2.1_compressed.pt``."""
    processor: UserPath | None = Field(default=H14, json_schema_extra=NOT_IDENTITY)
    """Folder or name with the tokenizer and the image settings."""


class Reward(ClipReward):
    """Score ``hpsv2``: the cosine of the embeddings of picture and prompt, averaged over video frames.

    As in the original, pictures that are not square are padded with black, not cut, and texts are mended by ftfy.
    """

    def __init__(self, options: Options) -> None:
        self._clip = Clip(options, padded)

    @property
    def version(self) -> str:
        """Return the versions of the packages, ftfy's among them, and the digest of the model's files."""
        return f"{self._clip.version}, ftfy {version('ftfy')}"

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return each sample's scores by name, or the error that says why it has none, in order."""
        return super().score([replace(sample, prompt=mended(sample.prompt)) for sample in samples])

    def scores(self, cosine: float) -> dict[str, float]:
        """Return the cosine."""
        return {"hpsv2": cosine}


def padded(frame: np.ndarray, side: int) -> np.ndarray:
    """Return a frame scaled to a longer side of ``side`` pixels, in the centre of a black square."""
    image = Image.fromarray(frame)
    scale = side / max(image.size)
    size = round(image.width * scale), round(image.height * scale)
    square = Image.new("RGB", (side, side))
    corner = (side - size[0]) // 2, (side - size[1]) // 2
    square.paste(image if size == image.size else image.resize(size, Image.Resampling.BICUBIC), corner)
    return np.asarray(square)


def mended(prompt: str) -> str:
    """Return a prompt as open_clip's tokenizer reads it: broken encodings and HTML entities are replaced."""
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(prompt))).split())


def prepare(source: Path, target: Path) -> None:
    """Convert the published file ``source`` to the new folder ``target``."""
    tensors = import_module("cosmos_rl_core.importers.pickled_tensors").read(source, "HPS_v2.1_compressed.pt")
    import_module("cosmos_rl_core.importers.open_clip").convert(tensors, target, str(source))
