"""Prompts for rendering words: a text file, one prompt per line, the word between double quotes."""

from pathlib import Path
from typing import Literal

from cosmos_rl_core.config.base import UserPath
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.datasets._prompt_files import read_prompts

SHIPPED_DIR = Path(__file__).parent / "data" / "ocr_words"
"""Prompt set of the package: the words of ``rendered_text`` with default options."""


class Options(DatasetOptions):
    """Prompt file."""

    name: Literal["ocr"] = "ocr"  # pyright: ignore[reportIncompatibleVariableOverride]

    local_dir: UserPath = ""
    """Folder with ``train.txt`` and ``test.txt``. Default: the two-character words of this package."""
    split: Literal["train", "test"] = "train"
    """File to read."""


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts of the split. Raises :class:`ConfigError` if the file is missing or holds none."""
    return read_prompts(Path(options.local_dir or SHIPPED_DIR) / f"{options.split}.txt")
