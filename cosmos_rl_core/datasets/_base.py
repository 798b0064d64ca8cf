"""What a dataset plugin offers.

A plugin file has a class ``Options`` (a :class:`DatasetOptions`) and the function ``prompts``. One that has media is a
:class:`MediaPlugin`: it has a class ``Media`` and the function ``digest`` besides.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from pydantic import Field

from cosmos_rl_core.config.base import Section


class Prompt(Section):
    """One prompt. Samples are grouped by ``id``, never by text."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    """Stable, unique within its prompt set, safe as a file name."""
    text: str
    """What the text encoder reads."""
    metadata: dict[str, Any] = {}
    """JSON values that rewards read beside the text, e.g. the objects and counts that geneval looks for."""

    def __hash__(self) -> int:
        return hash((self.id, self.text))


def prompt_id(text: str) -> str:
    """An id made from the prompt's text alone, so that it survives reordering and is shared by data sets."""
    return f"p-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Media(Protocol):
    """A media set with random access: item ``i`` is the same on every machine, in every order."""

    prompts: tuple[Prompt, ...]
    """Every prompt that an item can have."""
    item_ids: tuple[str, ...]
    """The id of each item: stable where items are added, safe as a file name."""

    def __len__(self) -> int: ...

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of item ``index``, without its pixels. ``IndexError`` beyond the set."""
        ...

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Item ``index``: uint8 RGB pixels ``[frames, height, width, 3]`` (one frame for an image), and its prompt."""
        ...


class MediaPlugin(Protocol):
    """The module of a dataset plugin that has media."""

    Media: Callable[[Any], Media]

    def prompts(self, options: Any) -> tuple[Prompt, ...]:
        """Every prompt that an item can have. Raises one :class:`ConfigError` with every mistake in the set."""
        ...

    def digest(self, options: Any) -> str:
        """Digest of the names and bytes of the files that it reads; "" where options alone decide every item."""
        ...
