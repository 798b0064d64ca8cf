"""Scores of a reward service with cosmos-rl's protocol.

The environment names the service: ``REMOTE_REWARD_ENQUEUE_URL``, ``REMOTE_REWARD_FETCH_URL``, ``REMOTE_REWARD_TOKEN``.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cosmos_rl_core.config.base import NOT_IDENTITY
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError, UnavailableError
from cosmos_rl_core.processes import TRAFFIC
from cosmos_rl_core.rewards._base import Ask, LatentSample, Sample
from cosmos_rl_core.rewards._base.answers import brief, finite
from cosmos_rl_core.rewards._base.served import ScorerChangedError, ServedScorer, named, why_loading
from cosmos_rl_core.rewards._remote.client import Client, LostError, RefusedError, Service, Ticket
from cosmos_rl_core.rewards._remote.frame import frame
from cosmos_rl_core.rewards._remote.tries import RETRY_DELAYS_S, tries
from cosmos_rl_core.rewards._remote.window import Request, Window

DECODED_CHANNELS = (16, 48)
"""Numbers of channels of latents that services decode: Wan2.1's and Wan2.2's."""
IN_FLIGHT = 16
"""Largest number of requests that the service has at a time: enough to keep its processes busy while other requests and
answers are on their way. cosmos-rl's service silently drops the oldest of more than 60."""

CONFLICT = 409
"""Status of a service whose scorer is not the one that the request names."""
LOSSES = 3
"""Number of lost requests after which a fetch URL that never knew any request counts as wrong."""

Samples = Sequence[Sample | LatentSample]
Entry = dict[str, float] | Exception
"""Scores of a sample, or its error."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_FAILED_TEXT = "Error"
"""Prediction of cosmos_reason1 for a sample that it could not score, together with a score of -1."""


class Options(RewardOptions):
    """Reward of the service, and how a score is made of its numbers."""

    name: Literal["remote"] = "remote"  # pyright: ignore[reportIncompatibleVariableOverride]

    reward_fn: str = Field(pattern=rf"^{_NAME}$")
    """The service's name of the reward, e.g. ``dance_grpo``."""
    score_key: str | None = Field(default=None, pattern=rf"^{_NAME}(\+{_NAME})*$")
    """The service's number to use if it returns several: ``overall_reward``, or a sum such as
    ``vq_reward+mq_reward``. Default: the number with the name of the reward."""
    scorer_version: str = Field(default="", max_length=200, json_schema_extra={"neutral": ""})
    """Version of the scorer, for a service that does not tell it, such as cosmos-rl's: any text, such as a date or a
    digest of weights. It is part of the identity of scores; change it when the scorer changes. Default: none."""
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
    references: Literal["ignored", "taken", "needed"] = Field(
        default="ignored", json_schema_extra={"neutral": "ignored"}
    )
    """Whether the service's reward reads the references of prompts, and whether it can score without them. If it reads
    them, they are sent. Only services of this package take them; cosmos-rl's protocol has no references."""
    batch_size: int = Field(default=8, ge=1)
    """Maximum number of samples in one request."""
    timeout_s: float = Field(default=1800.0, gt=0, json_schema_extra=NOT_IDENTITY)
    """Seconds within which a request must be scored; after that the service counts as unavailable."""

    @property
    def label(self) -> str:
        """Return a name that is unique among rewards of one service: ``remote-dance_grpo-overall_reward``."""
        return "-".join(filter(None, ["remote", self.reward_fn, self.score_key]))

    @property
    def uses_references(self) -> Literal["ignored", "taken", "needed"]:
        """Return the option ``references``."""
        return self.references

    def reads(self, num_frames: int) -> Literal["media", "latents"]:
        """Return ``latents`` for videos that are sent as latents, else ``media``."""
        return "latents" if self.media == "latents" and num_frames > 1 else "media"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bounds[0] >= self.bounds[1]:
            raise ValueError(f"clip_min = {self.clip_min} is not below clip_max = {self.clip_max}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds of the score, which may be infinite."""
        low, high = self.clip_min, self.clip_max
        return -math.inf if low is None else low, math.inf if high is None else high


class Reward:
    """Score under the options' label, and every number of the service under its own name."""

    def __init__(self, options: Options):
        self._options = options
        named_here = f", {options.scorer_version}" if options.scorer_version else ""
        self.version = f"reward service, {options.reward_fn}{named_here}"
        self._held: ServedScorer | None = None

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: only the service can check prompts."""
        return None

    def check_service(self) -> None:
        """Raise :class:`ConfigError` if the environment does not name the service."""
        Service.from_environment()

    def scorer(self) -> ServedScorer | None:
        """Ask the service for its scorer, and wait until that has loaded; None if the service does not tell.

        Raises :class:`UnavailableError` if it has not loaded in time, and :class:`ConfigError` if it uses references in
        another way than the options say.
        """
        name, timeout_s, why = self._options.reward_fn, self._options.timeout_s, ""
        with Client(Service.from_environment(), timeout_s) as client:
            for _ in tries(time.monotonic() + timeout_s, RETRY_DELAYS_S):
                told = client.scorers()
                if (why := why_loading(told, name)) is None:
                    return self._checked(named(told, name))
        reason = f": {why}" if why else ""
        raise UnavailableError(f"the reward service did not load {name} within {timeout_s:g} s{reason}; see its log")

    def _checked(self, scorer: ServedScorer | None) -> ServedScorer | None:
        """Return the scorer if its use of references fits the options. The options may ignore references that it takes.

        Raises :class:`ConfigError` if it needs references that the options do not send, or does not read the references
        that they send.
        """
        label, said, told = self._options.label, self._options.references, scorer.references if scorer else None
        if said != "ignored" and told is None:
            found = f"references = {said!r}, and the reward service does not say that it reads any"
            raise ConfigError(f'{label}: {found}; use a service of this package, or set references = "ignored"')
        if said != told and (told == "needed" or (told == "ignored" and said != "ignored")):
            found = f"references = {said!r}, and for {self._options.reward_fn} of the reward service they are {told}"
            raise ConfigError(f'{label}: {found}; set references = "{told}"')
        return scorer

    def hold_to(self, scorer: ServedScorer | None) -> None:
        """Take scores of this scorer only. Others raise :class:`ScorerChangedError`."""
        self._held = scorer

    def score(self, samples: Samples) -> list[Entry]:
        """Return scores or an error for each sample, in order.

        A refused request is repeated sample by sample, so that only failing samples are lost.
        """
        with self.window() as ask:
            return ask([*samples], lambda: None)

    @contextmanager
    def window(self, count: int = 1) -> Iterator[Ask]:
        """Open ``count`` windows of :data:`IN_FLIGHT` requests; see :class:`WindowReward`."""
        service, timeout_s = Service.from_environment(), self._options.timeout_s
        with Client(service, timeout_s) as client, Window(count * IN_FLIGHT) as window:
            yield partial(self._score, client, window)

    def _score(self, client: Client, window: Window, samples: Samples, sent: Callable[[], None]) -> list[Entry]:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, sample in enumerate(samples):
            kind, array = _sent(sample)
            alike.setdefault((kind, array.shape, _fps(sample, kind)), []).append(i)
        size = self._options.batch_size
        batches = [part[i : i + size] for part in alike.values() for i in range(0, len(part), size)]

        def ask(batch: list[int]) -> Future[Future[list[Entry]]]:
            return window.ask(self._request(client, [samples[i] for i in batch]))

        found = _answers(ask, batches, sent)
        return [found[i] for i in range(len(samples))]

    def _request(self, client: Client, samples: Samples) -> Request[list[Entry]]:
        """Make the request body of samples, yield, then send the body and return the samples' scores."""
        body = self._frame(samples)
        yield
        ticket = self._enqueue(client, body)
        # This frees memory. A service rarely loses a request; its body is then made again.
        del body
        told = self._result(client, samples, ticket)
        return self._entries(told["scores"], len(samples))

    def _result(self, client: Client, samples: Samples, ticket: Ticket) -> dict[str, Any]:
        """Return the service's answer. A request that the service has lost is sent again, within the same deadline."""
        lost: list[LostError] = []
        for _ in tries(ticket.deadline_s, RETRY_DELAYS_S, client.ended):
            try:
                told = client.result(ticket, self._options.reward_fn)
            except RefusedError as error:
                self._refuse_other(error)
                raise
            except LostError as error:
                lost.append(error)
                if len(lost) >= LOSSES and not client.known:
                    break
                ticket = self._enqueue(client, self._frame(samples), ticket.deadline_s)
            else:
                self._check_scorer(told.get("scorer"))
                return told
        raise lost[-1]

    def _check_scorer(self, told: Any) -> None:
        """Raise :class:`ScorerChangedError` if another scorer answered than the one given to :meth:`hold_to`."""
        found = ServedScorer.of(self._options.reward_fn, told)
        if self._held is not None and (found is None or found.digest != self._held.digest):
            raise ScorerChangedError.of(self._options.label, self._held, found)

    def _frame(self, samples: Samples) -> bytes:
        kind = _sent(samples[0])[0]
        arrays = np.stack([_sent(sample)[1] for sample in samples])
        fps = _fps(samples[0], kind)
        prompts = [sample.prompt for sample in samples]
        held = self._held
        metadata = [sample.metadata for sample in samples] if held and held.metadata else []
        sends = self._options.references != "ignored"
        references = [sample.references for sample in samples] if sends else []
        digest = held.digest if held else ""
        return frame(prompts, self._options.reward_fn, kind, arrays, fps, digest, metadata, references)

    def _enqueue(self, client: Client, body: bytes, deadline_s: float | None = None) -> Ticket:
        try:
            return client.enqueue(body, deadline_s)
        except RefusedError as error:
            self._refuse_other(error)
            raise

    def _refuse_other(self, error: RefusedError) -> None:
        """Raise :class:`ScorerChangedError` if the error comes from a service that has another scorer."""
        answer = error.answer
        if self._held is None or answer is None:
            return
        try:
            told = answer.json()
        except ValueError:
            told = None
        scorer = told.get("scorer") if isinstance(told, dict) else None
        # Failures may come from a service that has no scorer yet, or from one that names none.
        if answer.status_code == CONFLICT or ServedScorer.of(self._options.reward_fn, scorer) is not None:
            self._check_scorer(scorer)

    def _entries(self, scores: dict[str, Any], count: int) -> list[Entry]:
        """Return an entry per sample. Raises :class:`RefusedError` unless each key has a score for each sample."""
        keys = (self._options.score_key or self._options.reward_fn).split("+")
        if missing := [key for key in keys if key not in scores]:
            given, wanted = brief(", ".join(sorted(scores))) or "no scores", ", ".join(missing)
            advice = "if it never does, set score_key"
            raise RefusedError(f"{self._options.reward_fn} gives {given}, not {wanted}; {advice}")
        fit = [key for key, some in scores.items() if isinstance(some, list) and len(some) == count]
        if missing := [key for key in keys if key not in fit]:
            raise RefusedError(f"{missing[0]} has no list of {count} scores")
        return [self._entry(keys, {key: scores[key][i] for key in fit}) for i in range(count)]

    def _entry(self, keys: list[str], told: dict[str, Any]) -> Entry:
        """Return the service's answer for a sample as a score or an error."""
        options = self._options
        found = {key: finite(value) for key, value in told.items()}
        numbers = {key: number for key, number in found.items() if number is not None}
        wanted = [numbers.get(key) for key in keys]
        if _FAILED_TEXT in told.values() or None in wanted or options.failure_score in wanted:
            return RefusedError(f"the service could not score it: {brief(told)}")
        low, high = options.bounds
        score = min(max(sum(numbers[key] for key in keys), low), high)
        return numbers | {options.label: options.scale * score}


def _answers(
    ask: Callable[[list[int]], Future[Future[list[Entry]]]], batches: list[list[int]], sent: Callable[[], None]
) -> dict[int, Entry]:
    """Return the entry of each sample, by the index of the sample; call ``sent`` once all batches were sent.

    If a batch is refused, its samples are asked about one by one. Raises the first other error of any request.
    """
    asked: dict[Future[Any], list[int]] = {ask(batch): batch for batch in batches}
    unsent, found = {*asked}, dict[int, Entry]()
    while asked:
        with TRAFFIC.waiting():
            done = wait(asked, return_when=FIRST_COMPLETED).done
        for future in done:
            batch = asked.pop(future)
            unsent.discard(future)
            try:
                told = future.result()
            except RefusedError as error:
                if len(batch) == 1:
                    found[batch[0]] = error
                else:
                    asked |= {ask([i]): [i] for i in batch}
                continue
            if isinstance(told, Future):
                asked[told] = batch
            else:
                found |= zip(batch, told, strict=True)
        if not unsent:
            sent()
    return found


def _fps(sample: Sample | LatentSample, kind: str) -> float | None:
    return None if kind == "image" else sample.fps


def _sent(sample: Sample | LatentSample) -> tuple[str, np.ndarray]:
    """Return ``media_type`` and array of one sample."""
    if isinstance(sample, LatentSample):
        if (channels := len(sample.latents)) not in DECODED_CHANNELS:
            known = "reward services decode Wan's, of 16 or 48"
            raise ConfigError(f'latents of {channels} channels; {known}: set media = "pixels"')
        return "latent", sample.latents.astype(np.float16)
    if len(sample.pixels) == 1:
        return "image", sample.pixels[0]
    return "video", sample.pixels.transpose(3, 0, 1, 2)
