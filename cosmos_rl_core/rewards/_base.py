"""What a reward plugin offers. A plugin file has a class ``Options`` (a Section), and a class ``Reward``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Scored:
    """The facts of one generated sample that every reward sees."""

    sample_id: str
    prompt_id: str
    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """The prompt's metadata: JSON values from its dataset."""


@dataclass(frozen=True)
class Sample(Scored):
    """One generated sample as pixels."""

    pixels: np.ndarray
    """uint8 RGB ``[frames, height, width, 3]``; one frame for an image."""


@dataclass(frozen=True)
class LatentSample(Scored):
    """One generated sample as latents, for a reward whose options read ``latents``."""

    latents: np.ndarray
    """The final latents, normalised, float32 ``[channels, frames, height, width]``, of an image without frames."""


class Reward(Protocol):
    """Scores samples. Light: runs without torch; a scorer that needs a GPU belongs behind a service."""

    version: str
    """Names what computes the score (package and model versions); part of the scores' identity."""

    def check_prompt(self, text: str) -> str | None:
        """Why this prompt cannot be scored, or None. Called at plan time for every prompt."""
        ...

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """One entry a sample, in order: its scores by name, or what failed.

        The score of the options' label is the one trained on. Raise only if nothing can be scored at all (a service is
        away).
        """
        ...


@runtime_checkable
class ServedReward(Reward, Protocol):
    """A reward that something outside this machine computes."""

    def check_service(self) -> None:
        """Raise :class:`ConfigError` if this process is not told where the service is. Called when a run starts."""
        ...
