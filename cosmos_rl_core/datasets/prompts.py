"""Prompts from a file: a prompt per line of ``.txt``, an object per line of ``.jsonl``, a list of objects in ``.json``.

The prompt of an object is its text ``prompt``; its other values are metadata for rewards. cosmos-rl reads the same
files: ``pickscore/train.txt``, ``geneval/train_metadata.jsonl``, and the list for its validation.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.config.base import NOT_IDENTITY
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.errors import ConfigError

FORMATS = (".txt", ".jsonl", ".json")
MAX_MISTAKES = 50
"""Number of mistakes that are listed; of further ones, only the number is given."""


class Options(DatasetOptions):
    """Prompt file."""

    name: Literal["prompts"] = "prompts"  # pyright: ignore[reportIncompatibleVariableOverride]

    path: str = Field(json_schema_extra=NOT_IDENTITY)
    """Path of the file. The identity of a run holds the prompts, not the path."""


def prompts(options: Options) -> tuple[Prompt, ...]:
    """Return the prompts in file order, without surrounding white space and blank lines.

    Equal texts with equal metadata are one prompt, whose samples are one group. Raises one :class:`ConfigError` with
    every mistake in the file.
    """
    path = Path(options.path)
    if path.suffix.lower() not in FORMATS or not path.is_file():
        raise ConfigError(f"no prompt file at {path}; expected one of {', '.join(FORMATS)}")
    try:
        found = _entries(path.suffix.lower(), path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    expected = 'expected an object with the text "prompt"'
    mistakes = [f"{place}: {expected}" for place, text, _ in found if not text]
    if not found:
        mistakes.append("holds no prompt")
    if mistakes:
        more = [f"and {len(mistakes) - MAX_MISTAKES} more"] if len(mistakes) > MAX_MISTAKES else []
        raise ConfigError("\n    ".join([f"{path}:", *mistakes[:MAX_MISTAKES], *more]))
    prompts: dict[str, Prompt] = {}
    for _, text, metadata in found:
        known = prompts.get(name := prompt_id(text))
        if known is not None and known.metadata != metadata:
            name = prompt_id(text + canonical_json(metadata).decode())
        prompts.setdefault(name, Prompt(id=name, text=text, metadata=metadata))
    return tuple(prompts.values())


def _entries(extension: str, text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the place, text and metadata of each prompt; the text is "" if there is none.

    Raises ``ValueError`` if the file is not JSON.
    """
    if extension == ".json":
        values = json.loads(text)
        if not isinstance(values, list):
            raise ValueError("expected a list of objects")
        return [(f"entry {number}", *_parts(value)) for number, value in enumerate(values, 1)]
    numbered = enumerate(text.split("\n"), 1)
    lines = [(f"line {number}", line.strip()) for number, line in numbered if line.strip()]
    if extension == ".txt":
        return [(place, line, {}) for place, line in lines]
    return [(place, *_parts(_object(line))) for place, line in lines]


def _object(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _parts(value: Any) -> tuple[str, dict[str, Any]]:
    text = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(text, str):
        return "", {}
    return text.strip(), {name: other for name, other in value.items() if name != "prompt"}
