"""Text prompts for rendering words: a text file, one prompt a line, with the word to render between double quotes."""

from pathlib import Path
from typing import Literal

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.errors import ConfigError

SHIPPED_DIR = Path(__file__).parent / "data" / "ocr_words"
"""The prompt set that comes with the package: the words of ``rendered_text`` with its default options."""


class Options(DatasetOptions):
    """Which file to read."""

    name: Literal["ocr"] = "ocr"  # pyright: ignore[reportIncompatibleVariableOverride]

    local_dir: str = ""
    """Directory that holds ``train.txt`` and ``test.txt``; empty for the two-character words of this package."""
    split: Literal["train", "test"] = "train"
    """Which of the two files to read."""


def prompts(options: Options) -> tuple[Prompt, ...]:
    """All prompts of the split, in file order, without surrounding white space; blank lines are skipped.

    A prompt that is there twice is one prompt: its samples are one group.
    Raises :class:`ConfigError` if the file is missing, not UTF-8 or without a prompt.
    """
    path = Path(options.local_dir or SHIPPED_DIR) / f"{options.split}.txt"
    texts = dict.fromkeys(line.strip() for line in _read(path).splitlines() if line.strip())
    if not texts:
        raise ConfigError(f"{path} holds no prompt; expected one prompt a line")
    return tuple(Prompt(id=prompt_id(text), text=text) for text in texts)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"no file {path}; expected train.txt and test.txt in local_dir")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
