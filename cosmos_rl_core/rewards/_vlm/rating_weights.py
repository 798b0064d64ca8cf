"""Folders of models that rate, written from published files: weights, the text around prompts, the base's settings."""

import ast
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import ConfigError

ARCHITECTURE = "Qwen2VLRewardModelBT"
EMBEDDINGS = "model.language_model.embed_tokens.weight"
_SETTINGS = ("preprocessor_config.json", "chat_template.json", "chat_template.jinja", "generation_config.json")


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by their names in transformers 5, where both towers are in ``model``; the ``lm_head`` is left out.

    Raises :class:`ConfigError` if there are no embeddings among them.
    """
    found = {_name(name): tensor for name, tensor in tensors.items() if not name.startswith("lm_head.")}
    if EMBEDDINGS not in found:
        some = ", ".join([*tensors][:3]) or "none"
        raise ConfigError(f"the weights have no {EMBEDDINGS}, nor its older name; they have {some}; fetch them again")
    return found


def _name(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def write(
    target: Path, base: Path, weights: Mapping[str, Tensor], tokens: Iterable[str], texts: Mapping[str, str]
) -> None:
    """Write the folder: the weights, ``texts`` by the names of their files, and settings and tokenizer of ``base``.

    ``tokens`` are added to the tokenizer, in the order of their embeddings.
    """
    config = _resized(json_of(base / "config.json"), len(weights[EMBEDDINGS]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, local_files_only=True)
    # Not special to the tokenizer: the text around prompts has them on purpose.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    target.mkdir(parents=True)
    tokenizer.save_pretrained(target)
    for name in _SETTINGS:
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)
    for name, text in {"config.json": json.dumps(config), **texts}.items():
        (target / name).write_text(text, encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / "model.safetensors")


def _resized(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the base's settings for a model with so many embeddings."""
    nested = config.get("text_config")
    sizes = {"text_config": {**nested, "vocab_size": rows}} if isinstance(nested, dict) else {"vocab_size": rows}
    return {**config, **sizes, "architectures": [ARCHITECTURE], "tie_word_embeddings": False}


def constant(path: Path, name: str, where: str) -> str:
    """Return the text that a Python file of the repository ``where`` assigns to a name. The file is parsed, not run.

    Raises :class:`ConfigError` if file or name is missing.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is missing; copy it from the repository {where}")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return str(ast.literal_eval(node.value))
    raise ConfigError(f"{path} has no constant {name}")


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises :class:`ConfigError` if the file is missing or holds no JSON object."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing; fetch it")
    try:
        found = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; fetch it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; fetch it again")
    return found
