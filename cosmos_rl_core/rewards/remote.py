"""Scores of a reward service with cosmos-rl's protocol.

The environment names the service: ``REMOTE_REWARD_ENQUEUE_URL``, ``REMOTE_REWARD_FETCH_URL``, ``REMOTE_REWARD_TOKEN``.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cosmos_rl_core.config.base import NOT_IDENTITY
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._answers import brief, finite
from cosmos_rl_core.rewards._base import LatentSample, Sample
from cosmos_rl_core.rewards._client import Client, RefusedError, Ticket, frame
from cosmos_rl_core.rewards._service import Service
from cosmos_rl_core.storage import media

DECODED_CHANNELS = (16, 48)
"""Numbers of channels of latents that services decode: Wan2.1's and Wan2.2's."""
IN_FLIGHT = 16
"""Number of concurrent requests; cosmos-rl's service silently drops the oldest of more than 60."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_FAILED_TEXT = "Error"
"""Prediction of cosmos_reason1 for a sample that it could not score, beside a score of -1."""


class Options(RewardOptions):
    """Reward of the service, and the use of its numbers."""

    name: Literal["remote"] = "remote"  # pyright: ignore[reportIncompatibleVariableOverride]

    reward_fn: str = Field(pattern=rf"^{_NAME}$")
    """The service's name of the reward, e.g. ``dance_grpo``."""
    score_key: str | None = Field(default=None, pattern=rf"^{_NAME}(\+{_NAME})*$")
    """The service's number to use if it returns several: ``overall_reward``, or a sum such as
    ``vq_reward+mq_reward``. Default: the number with the name of the reward."""
    clip_min: float | None = None
    """Lower bound of the score, before ``scale``. Default: none."""
    clip_max: float | None = None
    """Upper bound of the score, before ``scale``. Default: none."""
    scale: float = 1.0
    """Factor of the score."""
    failure_score: float | None = None
    """Number that the service returns if it could not score, e.g. -1 for ``dance_grpo``; such a sample counts as
    failed. Default: none."""
    media: Literal["latents", "pixels"] = "latents"
    """Form in which videos are sent: final latents in float16, or uint8 pixels, over 20 times larger. Latents are
    for models with Wan's VAE, such as Cosmos-Predict2.5. Evaluations keep no latents and send pixels."""
    batch_size: int = Field(default=8, ge=1)
    """Maximum number of samples in one request."""
    timeout_s: float = Field(default=1800.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """Seconds within which a request must be scored; after that the service counts as unavailable."""

    @property
    def label(self) -> str:
        """Return a name that is unique among rewards of one service: ``remote-dance_grpo-overall_reward``."""
        return "-".join(filter(None, ["remote", self.reward_fn, self.score_key]))

    def reads(self, num_frames: int) -> Literal["media", "latents"]:
        """Return ``latents`` for videos that are sent as latents, else ``media``."""
        return "latents" if self.media == "latents" and num_frames > 1 else "media"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.clip_min is not None and self.clip_max is not None and self.clip_min >= self.clip_max:
            raise ValueError(f"clip_min = {self.clip_min} is not below clip_max = {self.clip_max}")
        return self


class Reward:
    """Score under the options' label, and every number of the service under its own name."""

    def __init__(self, options: Options):
        self._options = options
        self.version = f"reward service, {options.reward_fn}"

    def check_prompt(self, text: str) -> str | None:
        """Return None: only the service can check prompts."""
        return None

    def check_service(self) -> None:
        """Raise :class:`ConfigError` if the environment does not name the service."""
        Service.from_environment()

    def score(self, samples: Sequence[Sample | LatentSample]) -> list[dict[str, float] | Exception]:
        """Return scores or an error for each sample, in order.

        A refused request is repeated sample by sample, so that only failing samples are lost.
        """
        alike: dict[tuple[str, Any], list[int]] = {}
        for i, sample in enumerate(samples):
            kind, array = self._sent(sample)
            alike.setdefault((kind, array.shape), []).append(i)
        size = self._options.batch_size
        batches = [part[i : i + size] for part in alike.values() for i in range(0, len(part), size)]
        found: dict[int, dict[str, float] | Exception] = {}
        if batches:
            with Client(Service.from_environment(), self._options.timeout_s) as client:
                for start in range(0, len(batches), IN_FLIGHT):
                    found |= self._ask(client, samples, batches[start : start + IN_FLIGHT])
        return [found[i] for i in range(len(samples))]

    def _ask(
        self, client: Client, samples: Sequence[Sample | LatentSample], batches: list[list[int]]
    ) -> dict[int, dict[str, float] | Exception]:
        """Return scores of batches of indices into ``samples``, which the service scores concurrently."""
        tickets = [self._enqueue(client, [samples[i] for i in batch]) for batch in batches]
        found: dict[int, dict[str, float] | Exception] = {}
        for batch, ticket in zip(batches, tickets, strict=True):
            try:
                if isinstance(ticket, RefusedError):
                    raise ticket
                scores = client.result(ticket, self._options.reward_fn)["scores"]
                found |= dict(zip(batch, self._entries(scores, len(batch)), strict=True))
            except RefusedError as error:
                alone = len(batch) == 1
                found |= {batch[0]: error} if alone else self._ask(client, samples, [[i] for i in batch])
        return found

    def _enqueue(self, client: Client, samples: Sequence[Sample | LatentSample]) -> Ticket | RefusedError:
        sent = [self._sent(sample) for sample in samples]
        kind, fps = sent[0][0], None if sent[0][0] == "image" else float(media.FPS)
        arrays = np.stack([array for _, array in sent])
        try:
            prompts = [sample.prompt for sample in samples]
            return client.enqueue(frame(prompts, self._options.reward_fn, kind, arrays, fps=fps))
        except RefusedError as error:
            return error

    def _sent(self, sample: Sample | LatentSample) -> tuple[str, np.ndarray]:
        """Return ``media_type`` and array of one sample."""
        if isinstance(sample, Sample):
            is_image = len(sample.pixels) == 1
            return ("image", sample.pixels[0]) if is_image else ("video", sample.pixels.transpose(3, 0, 1, 2))
        if (channels := len(sample.latents)) not in DECODED_CHANNELS:
            raise ConfigError(
                f'latents of {channels} channels; reward services decode Wan\'s, of 16 or 48: set media = "pixels"'
            )
        return "latent", sample.latents.astype(np.float16)

    def _entries(self, scores: dict[str, Any], count: int) -> list[dict[str, float] | Exception]:
        """Return an entry per sample. Raises :class:`RefusedError` unless each key has a score for each sample."""
        keys = (self._options.score_key or self._options.reward_fn).split("+")
        if missing := [key for key in keys if key not in scores]:
            raise RefusedError(
                f"{self._options.reward_fn} gives {brief(', '.join(sorted(scores))) or 'no scores'}, not "
                f"{', '.join(missing)}; if it never does, set score_key"
            )
        for key in keys:
            if not isinstance(scores[key], list) or len(scores[key]) != count:
                raise RefusedError(f"{key} has no list of {count} scores")
        columns = {key: some for key, some in scores.items() if isinstance(some, list) and len(some) == count}
        return [self._entry(keys, {key: some[i] for key, some in columns.items()}) for i in range(count)]

    def _entry(self, keys: list[str], told: dict[str, Any]) -> dict[str, float] | Exception:
        """Return the service's answer for a sample as a score or an error."""
        options = self._options
        numbers = {key: number for key, value in told.items() if (number := finite(value)) is not None}
        wanted = [numbers.get(key) for key in keys]
        if _FAILED_TEXT in told.values() or None in wanted or options.failure_score in wanted:
            return RefusedError(f"the service could not score it: {brief(told)}")
        low, high = (-math.inf if options.clip_min is None else options.clip_min), options.clip_max
        score = min(max(sum(numbers[key] for key in keys), low), math.inf if high is None else high)
        return numbers | {options.label: options.scale * score}
