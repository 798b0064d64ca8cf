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

    Raises :class:`ConfigError` if the file is missing, not UTF-8, without a prompt, or says the same prompt twice.
    """
    path = Path(options.local_dir or SHIPPED_DIR) / f"{options.split}.txt"
    numbers_by_text: dict[str, list[int]] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if line.strip():
            numbers_by_text.setdefault(line.strip(), []).append(number)
    if not numbers_by_text:
        raise ConfigError(f"{path} holds no prompt; expected one prompt a line")
    _refuse_duplicates(path, numbers_by_text)
    return tuple(Prompt(id=prompt_id(text), text=text) for text in numbers_by_text)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"no prompt file at {path}; expected local_dir to hold train.txt and test.txt")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error


def _refuse_duplicates(path: Path, numbers_by_text: dict[str, list[int]]) -> None:
    repeated = [(text, numbers) for text, numbers in numbers_by_text.items() if len(numbers) > 1]
    if repeated:
        found = "; ".join(f"lines {', '.join(map(str, numbers))}: {text}" for text, numbers in repeated[:10])
        more = f" and {len(repeated) - 10} more" if len(repeated) > 10 else ""
        raise ConfigError(f"{path} repeats {len(repeated)} prompt(s); keep one line of each: {found}{more}")
