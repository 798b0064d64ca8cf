"""Interface of captioner plugins.

A plugin file has a class ``Options`` (a :class:`CaptionerOptions`) and a class ``Captioner``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.chat.client import RefusedError
from cosmos_rl_core.config.train import CaptionerOptions
from cosmos_rl_core.outside_plugins import Pin, named_by


@dataclass(frozen=True)
class Medium:
    """An image or a video that needs a caption."""

    name: str
    """Name of one of its items, for error messages."""
    kind: Literal["image", "video"]
    frames: int
    """Number of frames; 1 for an image."""
    open: Callable[[], BinaryIO]
    """Function that opens its file, in which one can seek."""


class Captioner(Protocol):
    """A writer of captions."""

    def check(self) -> None:
        """Raise :class:`ConfigError` if no caption can be asked for in this environment. Called when a run starts."""
        ...

    def captions(self, media: Sequence[Medium]) -> Iterator[str | RefusedError]:
        """Yield a caption of each medium, or the error that says why it has none, in order.

        Raises ``UnavailableError`` if a service is away, and :class:`ConfigError` if it would refuse all media.
        """
        ...


def digest_of(options: CaptionerOptions, pins: Sequence[Pin]) -> str:
    """Return the digest of all that decides captions: the captioner's settings, and its code if it is from outside."""
    code = [pin.identity() for pin in named_by(options, pins)]
    return digest({"options": options.identity(), "plugins": code})
