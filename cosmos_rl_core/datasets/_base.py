"""What a dataset plugin offers. A plugin file has a class ``Options`` (a Section) and one or both of ``prompts`` and ``Media``."""

from typing import Protocol

import numpy as np

from cosmos_rl_core.config.base import Section


class Prompt(Section):
    """One prompt. Samples are grouped by ``id``, never by text."""

    id: str
    """Stable, unique within its prompt set, safe as a file name."""
    text: str
    """What the text encoder reads."""


class Media(Protocol):
    """A media set with random access: item ``i`` is the same on every machine, in every order."""

    prompts: tuple[Prompt, ...]
    """Every prompt that an item can have."""

    def __len__(self) -> int: ...

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Item ``index``: uint8 RGB pixels ``[frames, height, width, 3]`` (one frame for an image), and its prompt."""
        ...
