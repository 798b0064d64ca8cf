"""Judges behind OpenAI-compatible services: a rubric and pictures are sent, and a number is read in the answer."""

import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.chat.service import ChatService, ChatSettings, Content, Question, picture_part, text_part
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.answers import brief, finite
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._base.pixels import frames_of, no_reference

PROMPT = "{prompt}"
"""Text in a rubric that the prompt of the sample replaces."""
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class JudgeOptions(ChatSettings, RewardOptions):
    """Base of the ``Options`` of judges behind a service."""

    scorer_version: str = Field(default="", max_length=200, json_schema_extra={"neutral": ""})
    """Version of the model behind the service, which does not tell it: any text, such as a revision or a digest of
    weights. It is part of the identity of scores; change it when the judge changes. Default: none."""


class UnreadableError(ValueError):
    """An answer that states no score."""


class JudgeReward:
    """Base of rewards that ask a judge about each sample. A subclass has the question and reads the answers."""

    def __init__(self, settings: JudgeOptions, environment: Mapping[str, str] | None = None) -> None:
        self._settings, self._service = settings, ChatService(settings, environment)

    rubric: str
    """Text of the question, with :data:`PROMPT` where the prompt belongs."""
    parser: str
    """Text on how answers are read. It is part of the scorer's identity, and so differs for other ways."""

    @property
    def version(self) -> str:
        """Return the model's name and its version in the recipe, the digest of rubric and parser, and the version of
        Pillow, which encodes the pictures.
        """
        settings = self._settings
        asked = digest({"rubric": self.rubric, "parser": self.parser})[:16]
        judge = " ".join(filter(None, [settings.model, settings.scorer_version]))
        return f"{judge} behind a chat endpoint, asked sha256:{asked}, pillow {version('pillow')}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: a judge takes every prompt."""
        return None

    def check_service(self) -> None:
        """Raise :class:`ConfigError` if the environment does not hold the token that the options name."""
        self._service.token()

    def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
        """Return the scores that the judge states for each sample, by name, or the sample's error, in order."""
        questions = [Question(sample.sample_id, partial(self._content, sample)) for sample in samples]
        return [self._read(answer) for answer in self._service.answers(questions)]

    def scores(self, answer: str) -> dict[str, float]:
        """Return the scores in an answer, by name. Raises :class:`UnreadableError` if it states none."""
        raise NotImplementedError

    def _read(self, answer: str | ValueError) -> dict[str, float] | Exception:
        if isinstance(answer, ValueError):
            return answer
        try:
            return self.scores(answer)
        except UnreadableError as error:
            return error

    def shown(self, sample: Sample) -> list[np.ndarray]:
        """Return the pictures ``[height, width, 3]`` that are sent about a sample: references, if the judge takes some,
        then the sample. Of a video some frames are sent.

        Raises ``ValueError`` if the pixels are no pictures, or if the judge needs references and the sample has none.
        """
        return [*self.before(sample), *self.chosen(sample)]

    def before(self, sample: Sample) -> list[np.ndarray]:
        """Return the pictures of references that are sent.

        Raises ``ValueError`` if the judge needs references and the sample has none.
        """
        uses = self._settings.uses_references
        if uses == "needed" and not sample.references:
            raise no_reference(sample)
        shown = () if uses == "ignored" else sample.references
        return [frame for one in shown for frame in self.chosen(replace(sample, pixels=one))]

    def asked(self, sample: Sample) -> str:
        """Return the text that is sent after the pictures."""
        return self.rubric.replace(PROMPT, sample.prompt)

    def chosen(self, sample: Sample) -> list[np.ndarray]:
        """Return at most ``num_frames`` of the sample's frames: the middle one of each of as many equal parts.

        Raises ``ValueError`` if the pixels are no pictures.
        """
        pixels = frames_of(sample)
        total, count = len(pixels), min(self._settings.num_frames, len(pixels))
        return [pixels[(2 * part + 1) * total // (2 * count)] for part in range(count)]

    def _content(self, sample: Sample) -> Content:
        images = [picture_part(_png(frame, self._settings.max_side), "png") for frame in self.shown(sample)]
        return [*images, text_part(self.asked(sample))]


def by_pattern(answer: str, pattern: str) -> float:
    """Return the number in the first group of a regular expression.

    Raises :class:`UnreadableError` if the answer has no number there, or several different ones.
    """
    found = {number(match) for match in re.findall(pattern, answer)}
    if len(found) != 1 or None in found:
        stated = f"{len(found)} different values" if len(found) > 1 else "no number"
        raise UnreadableError(f"the judge's answer has {stated} where {pattern!r} matches: {brief(answer)}")
    return float(found.pop() or 0.0)


def by_key(answer: str, key: str) -> float:
    """Return the number that a JSON object has under a key. The object may be in a fence of Markdown.

    Raises :class:`UnreadableError` if the answer is no JSON object, or has no number under the key.
    """
    fenced = _FENCE.search(answer)
    try:
        stated: Any = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the judge's answer is no JSON object: {brief(answer)}") from error
    value = finite(stated.get(key)) if isinstance(stated, dict) else None
    if value is None:
        raise UnreadableError(f"the judge's answer is no JSON object with a number {key!r}: {brief(answer)}")
    return value


def within(value: float, lowest: float, highest: float) -> float:
    """Return the value. Raises :class:`UnreadableError` if it is not between ``lowest`` and ``highest``."""
    if not lowest <= value <= highest:
        raise UnreadableError(f"the judge states {value:g}, expected {lowest:g} to {highest:g}")
    return value


def number(text: str) -> float | None:
    """Return a finite number that is written as text, else None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _png(frame: np.ndarray, max_side: int) -> bytes:
    picture, buffer = Image.fromarray(frame), io.BytesIO()
    picture.thumbnail((max_side, max_side))
    picture.save(buffer, "PNG")
    return buffer.getvalue()
