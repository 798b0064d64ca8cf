"""Folders of VLMs: their paths, checks whether they can be used, the digest of the files. Without torch."""

from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import ConfigError, mistakes_in
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.vlms._base import Changes, architecture, processor_of
from cosmos_rl_core.vlms._settings import BOTH, LEGACY_TEMPLATE, json_object

WEIGHTS = "model.safetensors"
"""Name of the weights in one file. With ``.index.json`` appended: the list of several files."""
TEMPLATE = "chat_template.jinja"
TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
TOKENIZERS = (TOKENIZER, "vocab.json", "tokenizer.model")
"""Files of tokenizers. Each has at least one of them."""

_SUFFIXES = {".json", ".jinja", ".txt", ".model"}
"""Suffixes of settings, templates and vocabularies, in the folder itself."""


def resolve(model: str) -> str:
    """Return the absolute path of a VLM: of a folder, or of a repository of the Hugging Face hub in the local cache.

    Raises :class:`ConfigError` if it is neither.
    """
    path = Path(model)
    return str((path if path.is_dir() else directories.cached_path(model, "a VLM of transformers")).resolve())


def digest(path: str) -> str:
    """Return the digest of the files of a folder that decide answers: weights, settings, tokenizer, chat template."""
    settings = [file.name for file in Path(path).iterdir() if file.suffix in _SUFFIXES and file.is_file()]
    return files_digest({name: Path(path, name) for name in (*settings, *weight_files(path))})


def weight_files(path: str) -> list[str]:
    """Return the names of the files with the weights, as transformers chooses them, sorted.

    Raises :class:`ConfigError` if there are no safetensors.
    """
    if Path(path, WEIGHTS).is_file():
        return [WEIGHTS]
    index = (json_object(path, f"{WEIGHTS}.index.json") or {}).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()) or not index:
        raise ConfigError(f"no {WEIGHTS}, nor {WEIGHTS}.index.json with a weight_map; no other weights are read")
    return sorted(set(index.values()))


def check(path: str, changes: Changes, instruction: str) -> None:
    """Raise one :class:`ConfigError` with every reason why the VLM in ``path`` cannot answer ``instruction``.

    Reads no weights. The tokenizer itself is read when the model is loaded, because that imports torch.
    """
    # If the folder names no class, nothing else can be checked.
    architecture(path)
    mistakes: list[str] = []
    for require in (
        lambda: processor_of(path, changes),
        lambda: _require_weights(path),
        lambda: _require_tokenizer(path),
        lambda: _require_plain(path, instruction),
    ):
        try:
            require()
        except ConfigError as error:
            # Mistakes in the settings name the folder themselves.
            mistakes.append(str(error).removeprefix(f"{path}:\n    "))
    if mistakes:
        raise mistakes_in(path, mistakes)


def _require_weights(path: str) -> None:
    missing = [name for name in weight_files(path) if not Path(path, name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"{', '.join(missing[:3])}{more} of the weights are missing; fetch them")


def _require_tokenizer(path: str) -> None:
    mistakes: list[str] = []
    if not any(Path(path, name).is_file() for name in TOKENIZERS):
        mistakes.append(f"no tokenizer; expected one of {', '.join(TOKENIZERS)}")
    settings = (TOKENIZER_SETTINGS, BOTH, LEGACY_TEMPLATE)
    if not Path(path, TEMPLATE).is_file() and not any(
        (json_object(path, name) or {}).get("chat_template") for name in settings
    ):
        mistakes.append(f"no chat template; expected {TEMPLATE}, or chat_template in one of {', '.join(settings)}")
    if mistakes:
        raise ConfigError("; ".join(mistakes))


def _require_plain(path: str, instruction: str) -> None:
    """Raise :class:`ConfigError` on special tokens in the instruction: every conversation with it would be refused."""
    listed: Any = (json_object(path, TOKENIZER) or {}).get("added_tokens")
    decoder: Any = (json_object(path, TOKENIZER_SETTINGS) or {}).get("added_tokens_decoder")
    tokens = [*(listed if isinstance(listed, list) else []), *(decoder.values() if isinstance(decoder, dict) else [])]
    special = {str(token.get("content")) for token in tokens if isinstance(token, dict) and token.get("special")}
    if found := sorted(token for token in special if token in instruction):
        raise ConfigError(f"the instruction holds {', '.join(map(repr, found))}, special to the model; leave it out")
