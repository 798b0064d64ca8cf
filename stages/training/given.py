"""Given frames: how many latent frames a video begins with, and from which item of the data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.models._base import Conditioning, given_frames
from stages import contracts
from stages.artifacts.request import Request
from stages.formats.prepared import Latents

NUM_GIVEN, GIVEN_ITEM = "given_frames", "given_item"
"""Columns of a sample's index row; the item is there only if it gave a frame."""


def num_given(bounds: tuple[int, int], generator: np.random.Generator) -> int:
    """Draw how many latent frames are given, uniformly between the bounds."""
    fewest, most = bounds
    return int(generator.integers(fewest, most + 1))


def own_frames(latents: Tensor, bounds: tuple[int, int], generator: np.random.Generator) -> Conditioning:
    """Return the conditioning on a drawn number of the first frames of an item itself.

    Empty for models that are given none.
    """
    return given_frames(latents[:, : num_given(bounds, generator)], latents.shape[1]) if bounds[1] > 0 else {}


@dataclass(frozen=True)
class GivenMedia:
    """The frames that the rollouts of one iteration begin with: the same for all samples of a prompt."""

    latents: Latents
    bounds: tuple[int, int]
    """Fewest and most frames."""
    key: tuple[int, int]
    """Run seed and iteration."""

    @classmethod
    def of(cls, request: Request) -> "GivenMedia | None":
        """Return the given frames of a rollout; None if it begins with noise alone."""
        config = request.config
        assert isinstance(config, contracts.Rollout)
        if config.given_frames[1] == 0:
            return None
        (source,) = request.inputs["data"]
        return cls(Latents(source), config.given_frames, (request.seed, request.iteration or 0))

    def facts(self, prompt_id: str) -> dict[str, Any]:
        """Return how many frames are given, and of which item, for the index rows of a prompt's samples."""
        count = self._num_given(prompt_id)
        return {NUM_GIVEN: count} | ({GIVEN_ITEM: self._item(prompt_id)} if count else {})

    def conditioning(self, prompt_id: str) -> Conditioning:
        """Return the conditioning of :func:`cosmos_rl_core.models._base.given_frames`, also for 0 frames."""
        latents = self.latents[self._item(prompt_id)]
        return given_frames(latents[:, : self._num_given(prompt_id)], latents.shape[1])

    def _num_given(self, prompt_id: str) -> int:
        return num_given(self.bounds, self._generator("given frames", prompt_id))

    def _item(self, prompt_id: str) -> str:
        return self.latents.choose(prompt_id, self._generator("given item", prompt_id))[0]

    def _generator(self, purpose: str, prompt_id: str) -> np.random.Generator:
        seed, iteration = self.key
        return seeds.generator(seed, purpose, iteration, prompt_id)
