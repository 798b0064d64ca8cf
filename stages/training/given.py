"""Given frames: how many latent frames a video begins with, and from which item of the data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.models._conditioning import Entries, given_frames
from stages import contracts
from stages.artifacts.request import Request
from stages.formats.latents import Latents

NUM_GIVEN, GIVEN_ITEM = "given_frames", "given_item"
"""Columns of a sample's index row: the number of given frames, and the item; the item only if it gave a frame."""


def num_given(bounds: tuple[int, int], generator: np.random.Generator) -> int:
    """Draw how many latent frames are given, uniformly between the bounds."""
    fewest, most = bounds
    return int(generator.integers(fewest, most + 1))


def own_frames(latents: Tensor, bounds: tuple[int, int], generator: np.random.Generator) -> Entries:
    """Return conditioning with a drawn number of the item's own first frames as given frames.

    Empty if ``bounds`` allow no given frames.
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
        return cls(Latents.of(request), config.given_frames, (request.seed, request.iteration or 0))

    def facts(self, prompt_id: str) -> dict[str, Any]:
        """Return the number of given frames and the item that gives them, for index rows of a prompt's samples."""
        count, item = self._drawn(prompt_id)
        return {NUM_GIVEN: count} | ({GIVEN_ITEM: item} if count else {})

    def entries(self, prompt_id: str) -> Entries:
        """Return a prompt's given frames, or none of them, as conditioning (``interfaces.models.given_frames``)."""
        count, item = self._drawn(prompt_id)
        latents = self.latents[item]
        return given_frames(latents[:, :count], latents.shape[1])

    def _drawn(self, prompt_id: str) -> tuple[int, str]:
        """Draw the number of given frames and their item."""
        seed, iteration = self.key
        of_frames, of_item = (
            seeds.generator(seed, purpose, iteration, prompt_id) for purpose in ("given frames", "given item")
        )
        return num_given(self.bounds, of_frames), self.latents.choose(prompt_id, of_item)[0]
