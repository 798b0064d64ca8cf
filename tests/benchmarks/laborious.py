"""A scorer whose samples take long: by computing, as on a core, or by waiting, as for a device. A reward plugin."""

import time
from typing import Literal

import numpy as np
from pydantic import Field

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import Sample

WIDTH = 256
"""Width of the matrices that are multiplied."""


class Options(RewardOptions):
    """How long a sample takes."""

    facts = Facts(scores={"laborious": "mean of a product of the pixels with themselves, at least 0"})
    name: Literal["laborious"] = "laborious"  # pyright: ignore[reportIncompatibleVariableOverride]
    products: int = Field(default=0, ge=0)
    """Number of products of matrices."""
    wait_s: float = Field(default=0.0, ge=0)


class Reward:
    """Score ``laborious``."""

    def __init__(self, options: Options) -> None:
        self.options, self.version = options, f"numpy {np.__version__}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Accept every prompt."""
        return None

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return a score a sample, one after the other."""
        return [{"laborious": self._score(sample)} for sample in samples]

    def _score(self, sample: Sample) -> float:
        time.sleep(self.options.wait_s)
        pixels = sample.pixels[0, :WIDTH, :WIDTH].mean(axis=-1) / 255
        product = pixels
        for _ in range(self.options.products):
            product = product @ pixels
            product /= product.max()
        return float(product.mean())
