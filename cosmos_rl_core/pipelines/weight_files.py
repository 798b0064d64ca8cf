"""Damage of a pipeline directory's files, found by sizes and headers: torch-free, so that plans can check.

The bytes of weights are not read. Files that no stage loads, such as half-precision variants, do not count.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.storage.tensor_headers import NUM_BYTES, Entry, num_bytes, read_header

_WEIGHTS = {"diffusers": directories.WEIGHTS, "transformers": "model.safetensors"}
"""Name of a component's weights in one file, by the library that saves them."""
_CONFIGS = {"Scheduler": "scheduler_config.json", "Tokenizer": "tokenizer_config.json"}
_CONFIGS["TokenizerFast"] = _CONFIGS["Tokenizer"]
"""Settings of a component without weights, by the end of its class's name; a model has ``config.json``."""
_NO_MODELS = (*_CONFIGS, "Processor", "ProcessorFast", "FeatureExtractor")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_MERGES = "merges.txt"
_READ_MERGES = ("CLIPTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")
"""Tokenizers that read merges beside ``vocab.json``, by the start of their class's name; without it they guess."""
_POINTER = b"version https://git-lfs"
"""Start of the file that git writes instead of a file that git-lfs has not fetched."""
_NEEDED = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")
"""Components of every pipeline. Each further text encoder has a further tokenizer."""
_SHARD = re.compile(r"(.+-)\d+-of-(\d+)\.safetensors")


def damages(path: str) -> list[str]:
    """Return a line for each missing or damaged file of the pipeline directory ``path``; each starts with the file."""
    folder = Path(path)
    index = _read(folder / directories.INDEX)
    if isinstance(index, str):
        return [index]
    found = list(_of_index(folder / directories.INDEX, index))
    for name, entry in index.items():
        # A part that is absent on purpose has null for its library.
        if isinstance(entry, list) and len(entry) == 2 and entry[0] in _WEIGHTS and entry[1] is not None:
            found += _of_component(folder / name, *entry)
    links = [file for name in directories.pipeline_files(path) if not (file := folder / name).is_file()]
    # The plan computes a digest of every file, also of those that no component needs.
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
    if not folder.is_dir():
        yield f"{_missing(folder)}, and {directories.INDEX} lists it as a {class_name}"
        return
    if not class_name.endswith(_NO_MODELS):
        yield from _of_json(folder / "config.json")
        yield from _of_weights(folder, library)
    else:
        configs = {folder / config for end, config in _CONFIGS.items() if class_name.endswith(end)}
        for config in configs:
            yield from _of_json(config)
        for file in sorted(set(folder.glob("[!.]*.json")) - configs):
            if file.is_file() and (wrong := _parsed(file)[1]) and not class_name.endswith("Scheduler"):
                yield f"{file} is damaged: {wrong}"
    if "Tokenizer" in class_name or folder.name.startswith("tokenizer"):
        yield from _of_vocabulary(folder, class_name)


def _of_vocabulary(folder: Path, class_name: str) -> Iterator[str]:
    there = {name: folder / name for name in (*_VOCABULARIES, _MERGES) if (folder / name).is_file()}
    if not there.keys() - {_MERGES}:
        yield f"{folder} has no vocabulary; expected one of {', '.join(_VOCABULARIES)}"
    for name, file in there.items():
        if name.endswith(".json"):
            values, wrong = _parsed(file)
            if not wrong and not (isinstance(values, dict) and values):
                yield f"{file} is damaged: expected a JSON object of tokens"
        elif wrong := _unreadable(file):
            yield wrong
    if class_name.startswith(_READ_MERGES) and not there.keys() & {"tokenizer.json", _MERGES} and "vocab.json" in there:
        yield f"{_missing(folder / _MERGES)}, and a {class_name} reads it beside vocab.json"


def _of_json(file: Path) -> Iterator[str]:
    if isinstance(found := _read(file), str):
        yield found


def _of_weights(folder: Path, library: str) -> Iterator[str]:
    """Check a component's index and all files that it names, or its one file."""
    name = _WEIGHTS[library]
    whole, index = folder / name, folder / f"{name}.index.json"
    # If there are both, diffusers reads the files of the index, transformers the one file.
    if not index.is_file() or (library == "transformers" and whole.is_file()):
        yield from _of_safetensors(whole) if whole.is_file() else _without_weights(folder, name)
        return
    values = _read(index)
    if isinstance(values, str):
        yield values
        return
    places = values.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        yield f"{index} is damaged: it has no weight_map, which names the file of each tensor"
        return
    yield from _of_shards(index, places)


def _of_shards(index: Path, places: Mapping[str, str]) -> Iterator[str]:
    """Check all files that an index names, and that it names every file of each numbered series."""
    shards = set(places.values())
    for shard in sorted(shards):
        file = index.parent / shard
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            yield f"{index} is damaged: it names {shard}, which is outside its folder"
        elif not file.is_file():
            yield f"{_missing(file)}, and {index.name} names it"
        else:
            yield from _of_safetensors(file, {tensor for tensor, place in places.items() if place == shard})
    for start, count in sorted({match.groups() for match in map(_SHARD.fullmatch, shards) if match}):
        series = (f"{start}{number:05d}-of-{count}.safetensors" for number in range(1, int(count) + 1))
        if lost := next((shard for shard in series if shard not in shards), None):
            there = "which is there" if (index.parent / lost).is_file() else "which is missing too"
            yield f"{index} is damaged: it does not name {lost}, {there}"


def _without_weights(folder: Path, name: str) -> Iterator[str]:
    others = sorted(file.name for file in folder.glob("*") if file.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    others += sorted(file.name for file in folder.glob("*.safetensors"))
    there = f"; there is {', '.join(others[:3])}, which is not read" if others else ""
    yield f"{_missing(folder / name)}{there}; weights are read from that file, or from those of {name}.index.json"


def _of_safetensors(file: Path, wanted: set[str] | None = None) -> Iterator[str]:
    """Compare the file's size with its header, and its tensors with ``wanted``, those that the index expects in it."""
    size = file.stat().st_size
    try:
        if wrong := _unreadable(file):
            yield wrong
            return
        with file.open("rb") as stream:
            start = int.from_bytes(stream.read(8), "little") + 8
            if size < 8 or (8 < start <= 10**8 and size < start):
                yield f"{file} is cut short: at least {max(start, 8) - size} bytes are missing, its header is not whole"
                return
            stream.seek(0)
            entries = read_header(stream)
    except (ArtifactError, OSError) as error:
        yield f"{file} is damaged: {error}"
        return
    expected = max((entry.end for entry in entries), default=start)
    if size < expected:
        yield f"{file} is cut short: {expected - size} of {expected} bytes are missing"
    elif size > expected:
        yield f"{file} is damaged: it has {size - expected} bytes more than its header says"
    if unfit := [entry.name for entry in entries if not _fits(entry)]:
        yield f"{file} is damaged: {len(unfit)} tensors do not have the bytes of their shape, e.g. {unfit[0]}"
    if wanted:
        tensors = {entry.name for entry in entries}
        if lost := sorted(wanted - tensors):
            yield f"{file} has no tensor {_counted(lost)}, and the index names it"
        if others := sorted(tensors - wanted):
            yield f"{file} has the tensor {_counted(others)}, which the index does not name there"


def _counted(names: list[str]) -> str:
    return names[0] + f" and {len(names) - 1} more" * (len(names) > 1)


def _fits(entry: Entry) -> bool:
    return entry.dtype not in NUM_BYTES or entry.end - entry.start == num_bytes(entry.dtype, entry.shape)


def _missing(file: Path) -> str:
    return f"{file} is missing" + (f" (a link to {file.readlink()}, which is not there)" if file.is_symlink() else "")


def _read(file: Path) -> dict[str, Any] | str:
    """Return the JSON object in a file, or the line of its damage."""
    if not file.is_file():
        return _missing(file)
    values, wrong = _parsed(file)
    if wrong:
        return f"{file} is damaged: {wrong}"
    return values if isinstance(values, dict) else f"{file} is damaged: expected a JSON object"


def _parsed(file: Path) -> tuple[Any, str]:
    """Return the JSON value in a file and its damage, empty for none."""
    data = b""
    try:
        data = file.read_bytes()
        return json.loads(data.decode("utf-8")), ""
    except (OSError, ValueError) as error:
        return None, _unfetched(data) or f"it is not JSON ({error})"


def _unreadable(file: Path) -> str:
    """Return the line of a file that is empty or a pointer of git-lfs; empty for other files."""
    with file.open("rb") as stream:
        start = stream.read(len(_POINTER))
    if not start:
        return f"{file} is empty"
    return f"{file} is damaged: {wrong}" if (wrong := _unfetched(start)) else ""


def _unfetched(start: bytes) -> str:
    """Return the damage of a file that starts with these bytes if it is a pointer of git-lfs; empty for others."""
    found = start.startswith(_POINTER)
    return "it is a pointer of git-lfs, which has not fetched the file: git lfs pull" if found else ""
