"""Interface of reward plugins. A plugin file has a class ``Options`` (a Section) and a class ``Reward``."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base.served import ServedScorer

STORED_FPS = 16.0
"""Frames per second of the videos that rollouts store: ``storage.media.FPS``, whose module is too heavy for a plan."""


@dataclass(frozen=True)
class Scored:
    """Facts about a generated sample that every reward gets."""

    sample_id: str
    prompt_id: str
    prompt: str
    metadata: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """The prompt's metadata: JSON values from its dataset."""
    fps: float = field(default=STORED_FPS, kw_only=True)
    """Frames per second of a video."""
    references: Sequence[np.ndarray] = field(default=(), kw_only=True)
    """The prompt's references, uint8 RGB ``[frames, height, width, 3]`` each, one frame for a picture. Empty for
    rewards that do not take them."""


@dataclass(frozen=True)
class Sample(Scored):
    """A generated sample as pixels."""

    pixels: np.ndarray
    """uint8 RGB ``[frames, height, width, 3]``; one frame for an image."""


@dataclass(frozen=True)
class LatentSample(Scored):
    """A generated sample as latents, for rewards whose options read ``latents``."""

    latents: np.ndarray
    """Final latents, normalised, float32 ``[channels, frames, height, width]``; without frames for an image."""


class Reward(Protocol):
    """Scores samples, without torch. A scorer that needs a GPU belongs behind a service."""

    version: str
    """Versions of the packages and models that compute the score; part of the identity of scores."""

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return why a prompt cannot be scored, or None. Called for every prompt when a run is planned."""
        ...

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return for each sample, in order, its scores by name, or its error.

        Training uses the score with the options' label. If it raises, each sample is scored alone. ``ConnectionError``,
        ``TimeoutError``, and ``UnavailableError`` and ``ConfigError`` of ``cosmos_rl_core.errors`` end the attempt.
        """
        ...


@runtime_checkable
class LabelledReward(Reward, Protocol):
    """A reward that a run may train on only if it was compared with labels of people."""

    def agreement(self) -> str:
        """Return one line of text on how far the reward agrees with labels.

        Called when a run that trains on it is planned. Raises :class:`ConfigError` if it was not compared.
        """
        ...


@runtime_checkable
class ServedReward(Reward, Protocol):
    """A reward that a service computes."""

    def check_service(self) -> None:
        """Raise :class:`ConfigError` if the environment does not name the service. Called when a run starts."""
        ...


@runtime_checkable
class PreparingReward(Reward, Protocol):
    """A reward that prepares samples in the background while it scores others."""

    def expect(self, samples: list[Sample]) -> None:
        """Prepare these samples, the same objects that :meth:`Reward.score` gets next. Any thread may call this."""
        ...


@runtime_checkable
class ProbedReward(Reward, Protocol):
    """A reward that computes more in batches of samples than its scores show.

    The test whether batches change scores compares its probes instead of its scores.
    """

    def probe(self, samples: list[Sample]) -> list[Any]:
        """Return for each sample, in order, values that change if any number computed in a batch does; or its error."""
        ...


@runtime_checkable
class NamedReward(Reward, Protocol):
    """A reward of a service that may name its scorer. A run then takes scores of that scorer only."""

    def scorer(self) -> ServedScorer | None:
        """Ask the service which scorer it has, and return it; None if the service does not tell."""
        ...

    def hold_to(self, scorer: ServedScorer | None) -> None:
        """Take scores of this scorer only; of any scorer if it is None."""
        ...


Ask = Callable[[list[Any], Callable[[], None]], list[dict[str, float] | Exception]]
"""Function that scores samples like :meth:`Reward.score`. It calls its second argument, maybe several times, once the
service has all of the samples."""


@runtime_checkable
class WindowReward(Reward, Protocol):
    """A reward of a service that has a fixed number of requests at a time, a window, which several callers share."""

    def window(self, count: int) -> AbstractContextManager[Ask]:
        """Open ``count`` windows; the context gives the function that scores samples through them.

        Any number of threads may call that function. After an error inside the context, the calls that still wait fail.
        """
        ...
