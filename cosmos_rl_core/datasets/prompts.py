"""Prompts from a file: a prompt per line of ``.txt``, an object per line of ``.jsonl``, a list of objects in ``.json``.

Or from a folder of files with one prompt each: ``.txt`` with a text, ``.json`` with an object. Other files are ignored.
The prompt of an object is its text ``prompt``; its other values, and the values of an object ``metadata`` in it, are
metadata for rewards. cosmos-rl reads the same files: ``pickscore/train.txt``, ``geneval/train_metadata.jsonl``, and the
list for its validation.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from cosmos_rl_core.config.base import NOT_IDENTITY, UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.datasets._prompt_files import read_prompts


class Options(DatasetOptions):
    """Prompt file, or folder of them."""

    name: Literal["prompts"] = "prompts"  # pyright: ignore[reportIncompatibleVariableOverride]

    path: UserPath = Field(json_schema_extra=NOT_IDENTITY)
    """Path of the file or folder. The identity of a run holds the prompts, not the path."""


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts of the file or folder. Raises one :class:`ConfigError` with every mistake in it."""
    return read_prompts(Path(options.path))
