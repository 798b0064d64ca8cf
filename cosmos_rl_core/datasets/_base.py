"""What a dataset plugin offers.

A plugin file has a class ``Options`` (a :class:`DatasetOptions`) and one or both of ``prompts`` and ``Media``.
"""

import hashlib
from typing import Protocol

import numpy as np
from pydantic import Field

from cosmos_rl_core.config.base import Section


class Prompt(Section):
    """One prompt. Samples are grouped by ``id``, never by text."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    """Stable, unique within its prompt set, safe as a file name."""
    text: str
    """What the text encoder reads."""


def prompt_id(text: str) -> str:
    """An id made from the prompt's text alone, so that it survives reordering and is shared by data sets."""
    return f"p-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Media(Protocol):
    """A media set with random access: item ``i`` is the same on every machine, in every order."""

    prompts: tuple[Prompt, ...]
    """Every prompt that an item can have."""

    def __len__(self) -> int: ...

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Item ``index``: uint8 RGB pixels ``[frames, height, width, 3]`` (one frame for an image), and its prompt."""
        ...
