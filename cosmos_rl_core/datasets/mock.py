"""Media of random pixels with meaningless captions, to try a run on a new machine without data.

Item ``i`` depends on its size, its number of frames and ``i`` only.
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from cosmos_rl_core import seeds
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt, prompt_id


class Options(DatasetOptions):
    """Number and size of the items."""

    name: Literal["mock"] = "mock"  # pyright: ignore[reportIncompatibleVariableOverride]

    num_items: int = Field(default=32, ge=1)
    """Number of media. Raising it leaves earlier items unchanged."""
    num_prompts: int = Field(default=8, ge=1)
    """Number of captions, which items use in turn."""
    size: tuple[PositiveInt, PositiveInt] = (1024, 1024)
    """Height and width in pixels."""
    frames: int = Field(default=1, ge=1)
    """Number of frames of an item; 1 for images."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_prompts > self.num_items:
            found = f"num_prompts {self.num_prompts} is more than num_items {self.num_items}"
            raise ValueError(found)
        return self


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts ``placeholder 0``, ``placeholder 1``, ..."""
    texts = [f"placeholder {number}" for number in range(options.num_prompts)]
    return tuple(Prompt(id=prompt_id(text), text=text) for text in texts)


def digest(options: Options) -> str:
    """Return "": no files are read."""
    return ""


class Media:
    """Media with random access."""

    def __init__(self, options: Options):
        self._options = options
        self.shape = (options.frames, *options.size)
        self.prompts = prompts(options)
        self.item_ids = tuple(f"{index:08d}" for index in range(options.num_items))

    def __len__(self) -> int:
        return self._options.num_items

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of item ``index``. Raises ``IndexError`` beyond the set."""
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of a set of {len(self)}")
        return self.prompts[index % len(self.prompts)]

    def item(self, index: int) -> tuple[np.ndarray, Prompt]:
        """Return item ``index``: uniform uint8 RGB pixels ``[frames, height, width, 3]``, and its prompt."""
        prompt, shape = self.prompt_of(index), (*self.shape, 3)
        return seeds.generator("mock", index).integers(0, 256, shape, dtype=np.uint8), prompt

    def fault(self, index: int) -> None:
        """Return None: no files are read."""
