"""Prompts for rendering words: a text file, one prompt per line, the word between double quotes."""

from pathlib import Path
from typing import Literal

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.errors import ConfigError

SHIPPED_DIR = Path(__file__).parent / "data" / "ocr_words"
"""Prompt set of the package: the words of ``rendered_text`` with default options."""


class Options(DatasetOptions):
    """Prompt file."""

    name: Literal["ocr"] = "ocr"  # pyright: ignore[reportIncompatibleVariableOverride]

    local_dir: str = ""
    """Folder with ``train.txt`` and ``test.txt``. Default: the two-character words of this package."""
    split: Literal["train", "test"] = "train"
    """File to read."""


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts of the split in file order, each once, without surrounding white space and blank lines.

    Raises :class:`ConfigError` if the file is missing, not UTF-8 or without a prompt.
    """
    path = Path(options.local_dir or SHIPPED_DIR) / f"{options.split}.txt"
    texts = dict.fromkeys(line.strip() for line in _read(path).splitlines() if line.strip())
    if not texts:
        raise ConfigError(f"{path} holds no prompt; expected one prompt per line")
    return tuple(Prompt(id=prompt_id(text), text=text) for text in texts)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"no file {path}; expected train.txt and test.txt in local_dir")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
