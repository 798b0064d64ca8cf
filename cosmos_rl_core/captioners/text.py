"""One caption for all media, such as the name of the one thing that they show."""

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import field_validator

from cosmos_rl_core.captioners._base import Medium
from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.config.train import CaptionerOptions


class Options(CaptionerOptions):
    """The caption."""

    by: Literal["text"] = "text"  # pyright: ignore[reportIncompatibleVariableOverride]

    text: str
    """The caption. White space around it is removed, as from captions in files."""

    @field_validator("text")
    @classmethod
    def _not_empty(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("the caption is empty")
        return text.strip()


class Captioner:
    """Gives every medium the same caption, without opening it."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def check(self) -> None:
        """Do nothing: no service is asked."""

    def captions(self, media: Sequence[Medium]) -> Iterator[str | RefusedError]:
        """Yield the caption for each medium."""
        return (self._options.text for _ in media)
