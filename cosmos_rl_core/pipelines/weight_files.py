"""Whether the files of a pipeline directory are whole, by their sizes and headers: torch-free, so that a plan can tell.

Their bytes are not read. Files that no stage loads, such as half-precision variants, do not count.
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
"""Name of a component's weights where they are one file, by the library that saves them."""
_TOKENIZER = "tokenizer_config.json"
_CONFIGS = {"Scheduler": "scheduler_config.json", "Tokenizer": _TOKENIZER, "TokenizerFast": _TOKENIZER}
"""What a component without weights needs, by the end of its class's name; a model has ``config.json``."""
_NO_MODELS = (*_CONFIGS, "Processor", "ProcessorFast", "FeatureExtractor")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_MERGES = "merges.txt"
_READ_MERGES = ("CLIPTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "RobertaTokenizer")
"""Tokenizers that read it beside ``vocab.json``, by the begin of their class's name; without it they guess."""
_POINTER = b"version https://git-lfs"
"""Begin of what git writes in the place of a file that git-lfs has not fetched."""
_NEEDED = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")
"""What every pipeline has; beside each further text encoder, it has a further tokenizer."""
_SHARD = re.compile(r"(.+-)(\d+)-of-(\d+)(\.safetensors)")


def damages(path: str) -> list[str]:
    """What is missing or damaged in the pipeline directory ``path``, a line a file; each names the file."""
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
    # The plan takes a digest of every file, also of those that no component needs.
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
    if lost := [*(name for name in _NEEDED if name not in there), *sorted(tokenizers - there - set(_NEEDED))]:
        yield f"{file} is damaged: it lists no {', '.join(lost)}"


def _missing(file: Path) -> str:
    return f"{file} is missing" + (f" (a link to {file.readlink()}, which is not there)" if file.is_symlink() else "")


def _of_component(folder: Path, library: str, class_name: str) -> Iterator[str]:
    if not folder.is_dir():
        yield f"{_missing(folder)}, and {directories.INDEX} lists it as a {class_name}"
        return
    is_model = not class_name.endswith(_NO_MODELS)
    config = "config.json" if is_model else next((c for end, c in _CONFIGS.items() if class_name.endswith(end)), None)
    if config is not None:
        yield from _of_json(folder / config)
    if is_model:
        yield from _of_weights(folder, library)
    elif not class_name.endswith("Scheduler"):
        yield from (f"{file} is damaged: {wrong}" for file in _jsons(folder, config) if (wrong := _parsed(file)[1]))
    if "Tokenizer" in class_name or folder.name.startswith("tokenizer"):
        yield from _of_vocabulary(folder, class_name)


def _jsons(folder: Path, besides: str | None) -> list[Path]:
    files = (file for file in folder.glob("*.json") if file.name != besides and not file.name.startswith("."))
    return sorted(file for file in files if file.is_file())


def _of_vocabulary(folder: Path, class_name: str) -> Iterator[str]:
    there = {name: folder / name for name in (*_VOCABULARIES, _MERGES) if (folder / name).is_file()}
    if not there.keys() - {_MERGES}:
        yield f"{folder} has no vocabulary; expected one of {', '.join(_VOCABULARIES)}"
    for name, file in there.items():
        if name.endswith(".json"):
            values, wrong = _parsed(file)
            if not wrong and not (isinstance(values, dict) and values):
                yield f"{file} is damaged: expected a JSON object of tokens"
        elif not (data := file.read_bytes()):
            yield f"{file} is empty"
        elif wrong := _unfetched(data):
            yield f"{file} is damaged: {wrong}"
    if class_name.startswith(_READ_MERGES) and not there.keys() & {"tokenizer.json", _MERGES} and "vocab.json" in there:
        yield f"{_missing(folder / _MERGES)}, and a {class_name} reads it beside vocab.json"


def _of_json(file: Path) -> Iterator[str]:
    if isinstance(found := _read(file), str):
        yield found


def _of_weights(folder: Path, library: str) -> Iterator[str]:
    """A component's index and all files that it names, or its one file."""
    name = _WEIGHTS[library]
    whole, index = folder / name, folder / f"{name}.index.json"
    # Where there are both, diffusers reads what the index names, transformers the one file.
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
    """All files that an index names, and those that it should name."""
    for shard in sorted(set(places.values())):
        file = index.parent / shard
        if PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            yield f"{index} is damaged: it names {shard}, which is outside its folder"
        elif not file.is_file():
            yield f"{_missing(file)}, and {index.name} names it"
        else:
            yield from _of_safetensors(file, {tensor for tensor, place in places.items() if place == shard})
    for shard in sorted(_unnamed(set(places.values()))):
        there = "which is there" if (index.parent / shard).is_file() else "which is missing too"
        yield f"{index} is damaged: it does not name {shard}, {there}"


def _unnamed(shards: set[str]) -> set[str]:
    """The first file of each numbered series that is not among ``shards``, which name others of it."""
    series: dict[tuple[str, int, str], set[int]] = {}
    for found in filter(None, map(_SHARD.fullmatch, shards)):
        begin, number, count, end = found.groups()
        series.setdefault((begin, int(count), f"-of-{count}{end}"), set()).add(int(number))
    firsts = {key: next((n for n in range(1, key[1] + 1) if n not in numbers), None) for key, numbers in series.items()}
    return {f"{begin}{first:05d}{end}" for (begin, _, end), first in firsts.items() if first is not None}


def _without_weights(folder: Path, name: str) -> Iterator[str]:
    others = sorted(file.name for file in folder.glob("*") if file.suffix in {".bin", ".pt", ".pth", ".ckpt"})
    others += sorted(file.name for file in folder.glob("*.safetensors"))
    there = f"; there is {', '.join(others[:3])}, which is not read" if others else ""
    yield f"{_missing(folder / name)}{there}; weights are read from that file, or from those of {name}.index.json"


def _of_safetensors(file: Path, wanted: set[str] | None = None) -> Iterator[str]:
    """Compare the file's size with what its header says, and its tensors with those that the index expects there."""
    size = file.stat().st_size
    if size == 0:
        yield f"{file} is empty"
        return
    try:
        with file.open("rb") as stream:
            if wrong := _unfetched(stream.read(len(_POINTER))):
                yield f"{file} is damaged: {wrong}"
                return
            stream.seek(0)
            begin = int.from_bytes(stream.read(8), "little") + 8
            stream.seek(0)
            if size < 8 or (8 < begin <= 10**8 and size < begin):
                yield f"{file} is cut short: at least {max(begin, 8) - size} bytes are missing, its header is not whole"
                return
            entries = read_header(stream)
    except (ArtifactError, OSError) as error:
        yield f"{file} is damaged: {error}"
        return
    expected = max((entry.end for entry in entries), default=begin)
    if size < expected:
        yield f"{file} is cut short: {expected - size} of {expected} bytes are missing"
    elif size > expected:
        yield f"{file} is damaged: it has {size - expected} bytes more than its header says"
    if wrong := [entry.name for entry in entries if not _fits(entry)]:
        yield f"{file} is damaged: {len(wrong)} tensors do not have the bytes of their shape, e.g. {wrong[0]}"
    tensors = {entry.name for entry in entries}
    if wanted and (lost := sorted(wanted - tensors)):
        yield f"{file} has no tensor {_counted(lost)}, and the index names it"
    if wanted and (others := sorted(tensors - wanted)):
        yield f"{file} has the tensor {_counted(others)}, which the index does not name there"


def _counted(names: list[str]) -> str:
    return names[0] + f" and {len(names) - 1} more" * (len(names) > 1)


def _fits(entry: Entry) -> bool:
    return entry.dtype not in NUM_BYTES or entry.end - entry.start == num_bytes(entry.dtype, entry.shape)


def _read(file: Path) -> dict[str, Any] | str:
    """The JSON object in a file, or what is wrong with it."""
    if not file.is_file():
        return _missing(file)
    values, wrong = _parsed(file)
    if wrong:
        return f"{file} is damaged: {wrong}"
    return values if isinstance(values, dict) else f"{file} is damaged: expected a JSON object"


def _parsed(file: Path) -> tuple[Any, str]:
    """The JSON value in a file, and what is wrong with the file, empty if nothing is."""
    data = b""
    try:
        data = file.read_bytes()
        return json.loads(data.decode("utf-8")), ""
    except (OSError, ValueError) as error:
        return None, _unfetched(data) or f"it is not JSON ({error})"


def _unfetched(begin: bytes) -> str:
    """What is wrong with a file that begins so, if it is a pointer of git-lfs; empty for others."""
    found = begin.startswith(_POINTER)
    return "it is a pointer of git-lfs, which has not fetched the file: git lfs pull" if found else ""
