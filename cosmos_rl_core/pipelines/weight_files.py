"""Damage to a pipeline directory's files, found by sizes and headers: torch-free, so that plans can check.

The bytes of weights are not read. Files that no stage loads, such as half-precision variants, do not count.
"""

from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import Any

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage.tensor_headers import NUM_BYTES, num_bytes, read_header

_WEIGHTS = {"diffusers": directories.WEIGHTS, "transformers": "model.safetensors"}
"""Name of a component's weights in one file, by the library that saves them."""
_CONFIGS = {"Scheduler": "scheduler_config.json", "Tokenizer": "tokenizer_config.json"}
_CONFIGS |= {"TokenizerFast": "tokenizer_config.json", "FeatureExtractor": ""}
_CONFIGS |= {f"Processor{backend}": "" for backend in ("", "Fast", "Pil")}
"""Settings of a component without weights, by the end of its class's name; a model has ``config.json``."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_MERGES = "merges.txt"
_READ_MERGES = ("CLIPTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")
"""Tokenizers that read merges and ``vocab.json``, by the start of their class's name; without merges they guess."""
_POINTER = b"version https://git-lfs"
"""Start of the file that git writes instead of a file that git-lfs has not fetched."""
_NEEDED = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")
"""Components of every pipeline. Each further text encoder has a further tokenizer."""


def damages(path: str) -> list[str]:
    """Return a line for each missing or damaged file of the pipeline directory ``path``; each starts with the file."""
    folder = Path(path)
    index, line = _object(folder / directories.INDEX)
    if line:
        return [line]
    found = list(_of_index(folder / directories.INDEX, index))
    for name, entry in index.items():
        # A part that is absent on purpose has null for its library.
        if isinstance(entry, list) and len(entry) == 2 and entry[0] in _WEIGHTS and entry[1] is not None:
            found += filter(None, _of_component(folder / name, *entry))
    links = [file for name in directories.pipeline_files(path) if not (file := folder / name).is_file()]
    # The plan computes a digest of every file, also of files that no component needs.
    return found + [_missing(link) for link in links if not any(line.startswith(f"{link} ") for line in found)]


def all_missing(damages: list[str]) -> bool:
    """Return whether each of the damages is an absent file, such as weights that were not downloaded."""
    return all(
        " is damaged: " not in damage and (" is missing" in damage or " has no vocabulary" in damage)
        for damage in damages
    )


def _of_index(file: Path, index: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(index.get("_class_name"), str):
        yield f"{file} is damaged: it has no _class_name, which names the pipeline's class"
    there = {name for name, value in index.items() if isinstance(value, list) and None not in value}
    tokenizers = {name.replace("text_encoder", "tokenizer") for name in there if name.startswith("text_encoder")}
    if lost := [name for name in dict.fromkeys((*_NEEDED, *sorted(tokenizers))) if name not in there]:
        yield f"{file} is damaged: it lists no {', '.join(lost)}"


def _of_component(folder: Path, library: str, class_name: str) -> Iterator[str]:
    """Yield a line on the damage of each file of a component, "" for files without damage."""
    if not folder.is_dir():
        yield f"{_missing(folder)}, and {directories.INDEX} lists it as a {class_name}"
        return
    config = next((file for end, file in _CONFIGS.items() if class_name.endswith(end)), "config.json")
    if config:
        yield _object(folder / config)[1]
    if config == "config.json":
        yield from _of_weights(folder, library)
    if "Tokenizer" in class_name or folder.name.startswith("tokenizer"):
        yield from _of_vocabulary(folder, class_name)


def _of_vocabulary(folder: Path, class_name: str) -> Iterator[str]:
    there = {file.name: file for file in sorted(folder.glob("[!.]*")) if file.is_file()}
    if there.keys().isdisjoint(_VOCABULARIES):
        yield f"{folder} has no vocabulary; expected one of {', '.join(_VOCABULARIES)}"
    for name, file in there.items():
        if name in _VOCABULARIES and file.suffix == ".json":
            yield _object(file)[1]
        elif name in (*_VOCABULARIES, _MERGES) or (file.suffix == ".json" and name != "tokenizer_config.json"):
            yield _damage(file)
    if class_name.startswith(_READ_MERGES) and not there.keys() & {"tokenizer.json", _MERGES} and "vocab.json" in there:
        yield f"{_missing(folder / _MERGES)}, and a {class_name} reads it together with vocab.json"


def _of_weights(folder: Path, library: str) -> Iterator[str]:
    """Check a component's index and all files that it names, or its one file."""
    name = _WEIGHTS[library]
    whole, index = folder / name, folder / f"{name}.index.json"
    # If there are both, diffusers reads the files of the index, transformers the one file.
    if not index.is_file() or (library == "transformers" and whole.is_file()):
        yield from _of_safetensors(whole) if whole.is_file() else _without_weights(folder, name)
        return
    values, line = _object(index)
    places = values.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        yield line or f"{index} is damaged: it has no weight_map, which names the file of each tensor"
        return
    for shard in sorted(set(places.values())):
        file = folder / shard
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            yield f"{index} is damaged: it names {shard}, which is outside its folder"
        elif not file.is_file():
            yield f"{_missing(file)}, and {index.name} names it"
        else:
            yield from _of_safetensors(file, {tensor for tensor, place in places.items() if place == shard})


def _without_weights(folder: Path, name: str) -> Iterator[str]:
    suffixes = {".bin", ".pt", ".pth", ".ckpt", ".safetensors"}
    others = sorted(file.name for file in folder.glob("*") if file.suffix in suffixes)
    there = f"; there is {', '.join(others[:3])}, which is not read" if others else ""
    yield f"{_missing(folder / name)}{there}; weights are read from that file, or from the files of {name}.index.json"


def _of_safetensors(file: Path, wanted: Set[str] = frozenset()) -> Iterator[str]:
    """Compare the file's size with its header, and its tensors with ``wanted``, which the index expects in it."""
    if line := _damage(file):
        yield line
        return
    try:
        with file.open("rb") as stream:
            entries = read_header(stream)
    except (ArtifactError, OSError) as error:
        yield f"{file} is damaged: {error}"
        return
    size, expected = file.stat().st_size, max((entry.end for entry in entries), default=0)
    if size < expected:
        yield f"{file} is cut short: {expected - size} of {expected} bytes are missing"
    elif entries and size > expected:
        yield f"{file} is damaged: it has {size - expected} bytes more than its header says"
    for entry in entries:
        if entry.dtype in NUM_BYTES and entry.end - entry.start != num_bytes(entry.dtype, entry.shape):
            yield f"{file} is damaged: the tensor {entry.name} does not have the bytes of its shape"
    if lost := sorted(wanted - {entry.name for entry in entries}):
        yield f"{file} lacks {len(lost)} tensors that the index names, e.g. {lost[0]}"


def _missing(file: Path) -> str:
    return f"{file} is missing" + (f" (a link to {file.readlink()}, which is not there)" if file.is_symlink() else "")


def _object(file: Path) -> tuple[dict[str, Any], str]:
    """Return the JSON object in a file, and a line on its damage, "" without damage."""
    if line := _damage(file):
        return {}, line
    values = from_json(file.read_bytes())
    is_object = isinstance(values, dict) and bool(values)
    return (values, "") if is_object else ({}, f"{file} is damaged: expected a JSON object with entries")


def _damage(file: Path) -> str:
    """Return a line on a file that is missing, empty, a pointer of git-lfs or not JSON; "" for other files."""
    if not file.is_file():
        return _missing(file)
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_POINTER))
        if start == _POINTER:
            return f"{file} is damaged: it is a pointer of git-lfs, which has not fetched the file: git lfs pull"
        if file.suffix == ".json":
            from_json(file.read_bytes())
    except OSError as error:
        return f"{file} cannot be read: {error}"
    except ValueError as error:
        return f"{file} is damaged: it is not JSON ({error})"
    return "" if start else f"{file} is empty"
