"""Captions by a vision-language model behind an OpenAI-compatible service, such as vLLM's.

An image, or some frames of a video, is sent with an instruction to ``<url>/chat/completions``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Literal

from pydantic import Field

from cosmos_rl_core.captioners._base import Medium
from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.chat.service import ChatService, ChatSettings, Content, Question, picture_part, text_part
from cosmos_rl_core.config.train import CaptionerOptions
from cosmos_rl_core.datasets._pictures import pictures


class Options(ChatSettings, CaptionerOptions):
    """The service, its model and the instruction that it gets."""

    by: Literal["endpoint"] = "endpoint"  # pyright: ignore[reportIncompatibleVariableOverride]

    instruction: str = Field(min_length=1)
    """Text that is sent with the pictures, for example ``Describe this video in one paragraph.``"""

    @property
    def asked(self) -> str:
        """Return the instruction."""
        return self.instruction


class Captioner:
    """Asks the service, for several media at once."""

    def __init__(self, options: Options, environment: Mapping[str, str] | None = None) -> None:
        self._options, self._service = options, ChatService(options, environment)

    def check(self) -> None:
        """Raise :class:`ConfigError` if the environment does not hold the token that the options name."""
        self._service.token()

    def captions(self, media: Sequence[Medium]) -> Iterator[str | RefusedError]:
        """Yield a caption of each medium, or the error that says why it has none, in order."""
        questions = [Question(medium.name, partial(self._content, medium)) for medium in media]
        for answer in self._service.answers(questions):
            # A medium that cannot be decoded now never can be.
            known = isinstance(answer, str | RefusedError)
            yield answer if known else RefusedError(str(answer), final=True)

    def _content(self, medium: Medium) -> Content:
        """Return the instruction and the pictures of a medium. Raises ``ItemError`` if it cannot be decoded."""
        sizes = {"num_frames": self._options.num_frames, "max_side": self._options.max_side}
        with closing(medium.open()) as file:
            found = pictures(file, medium.kind, medium.frames, **sizes)
        return [text_part(self._options.instruction), *(picture_part(picture, "jpeg") for picture in found)]
