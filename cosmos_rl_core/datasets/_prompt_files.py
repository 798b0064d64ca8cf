"""Files of prompts: a prompt per line of ``.txt``, an object per line of ``.jsonl``, a list of objects in ``.json``."""

import json
from pathlib import Path
from typing import Any

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.datasets._base import Prompt, prompt_id
from cosmos_rl_core.errors import ConfigError, mistakes_in

FORMATS = (".txt", ".jsonl", ".json")


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Return the prompts in file order, without surrounding white space and blank lines.

    Equal texts with equal metadata are one prompt, whose samples are one group. Raises one :class:`ConfigError` with
    every mistake in the file.
    """
    if path.suffix.lower() not in FORMATS or not path.is_file():
        raise ConfigError(f"no prompt file at {path}; expected one of {', '.join(FORMATS)}")
    try:
        values = _values(path.suffix.lower(), path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    mistakes = [] if values else ["holds no prompt"]
    prompts: dict[str, Prompt] = {}
    for place, value in values:
        text = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(text, str) or not text.strip():
            mistakes.append(f'{place}: expected an object with the text "prompt"')
            continue
        text = text.strip()
        metadata = {name: other for name, other in value.items() if name != "prompt"}
        try:
            name, longer = prompt_id(text), prompt_id(text + canonical_json(metadata).decode())
        except ValueError as error:  # NaN, or half a surrogate pair
            mistakes.append(f"{place}: {error}")
            continue
        known = prompts.get(name)
        if known is not None and known.metadata != metadata:
            name = longer
        prompts.setdefault(name, Prompt(id=name, text=text, metadata=metadata))
    if mistakes:
        raise mistakes_in(path, mistakes)
    return tuple(prompts.values())


def _values(extension: str, text: str) -> list[tuple[str, Any]]:
    """Return the place and JSON value of each prompt. A line of text is the object of that prompt.

    Raises ``ValueError`` if the file is not JSON.
    """
    if extension == ".json":
        values = json.loads(text)
        if not isinstance(values, list):
            raise ValueError("expected a list of objects")
        return [(f"entry {number}", value) for number, value in enumerate(values, 1)]
    read = _object if extension == ".jsonl" else lambda line: {"prompt": line}
    lines = enumerate(map(str.strip, text.split("\n")), 1)
    return [(f"line {number}", read(line)) for number, line in lines if line]


def _object(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
