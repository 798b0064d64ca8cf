"""Folders with a LoRA in the format of diffusers, of peft or of cosmos-rl. Imports no torch, so that plans can read
them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import safe_open

from cosmos_rl_core.canonical import from_json
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.storage.file_digests import files_digest
from cosmos_rl_core.storage.tensor_headers import Entry, read_header
from cosmos_rl_core.weights import lora
from cosmos_rl_core.weights.shapes import matrices_of

NAMES = ("pytorch_lora_weights.safetensors", "model.safetensors", "adapter_model.safetensors")
"""Names of the file with the tensors: diffusers', exports', peft's."""
CONFIG = "adapter_config.json"
"""File of settings next to the tensors, if there is one: peft's, or cosmos-rl's."""
METADATA = "lora_adapter_metadata"
"""Metadata entry of the tensors' file with the settings, if there is one: diffusers'."""
_PREFIXES = (f"{directories.TRANSFORMER}.", "base_model.model.")
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.\w+)?\.weight")
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 3


@dataclass(frozen=True)
class AdapterFile:
    """The tensors of an adapter in a file."""

    path: Path
    entries: dict[str, Entry]
    """Entry of the file's header for each tensor, by the name that it has here."""

    @property
    def ranks(self) -> dict[str, int]:
        """Return the rank of each adapted module."""
        a = {name: entry for name, entry in self.entries.items() if ".lora_A." in name}
        return {name.rpartition(".lora_")[0]: entry.shape[0] for name, entry in a.items()}


def find(folder: Path) -> Path:
    """Return the file with the tensors of an adapter. Raises :class:`ConfigError` if there is none or several."""
    present = sorted(file.name for file in folder.glob("*.safetensors"))
    chosen = [name for name in NAMES if name in present] or present
    if len(chosen) != 1:
        found = f"it has {', '.join(present)}" if present else "it has no safetensors"
        raise ConfigError(f"{folder} is no adapter: expected one of the files {', '.join(NAMES)}, {found}")
    return folder / chosen[0]


def folder_digest(folder: Path) -> str:
    """Return the sha256 (hex) over the tensors' file and the file of settings next to it."""
    files = {file.name: file for file in (find(folder), folder / CONFIG) if file.is_file()}
    return files_digest(files)


def read(folder: Path) -> AdapterFile:
    """Return the tensors in the folder's file, named ``<module>.lora_A.weight`` and ``<module>.lora_B.weight``.

    Prefixes (``transformer.``, ``base_model.model.``) and names of adapters (``.default``) are left out. Raises
    :class:`ConfigError` for a damaged header, and for tensors that are not pairs of factors of a matrix.
    """
    path = find(folder)
    try:
        with path.open("rb") as stream:
            entries = read_header(stream)
    except ArtifactError as error:
        raise ConfigError(f"{path}: {error}; fetch it again") from error
    if entries and path.stat().st_size != (size := max(entry.end for entry in entries)):
        raise ConfigError(f"{path} has {path.stat().st_size} bytes, its header says {size}; fetch it again")
    found: dict[str, Entry] = {}
    strange: list[str] = []
    for entry in entries:
        name = _plain(entry.name)
        if name is None or entry.dtype not in _FLOATS or len(entry.shape) != 2 or 0 in entry.shape:
            strange.append(f"{entry.name} ({entry.dtype}, {list(entry.shape)})")
        elif name in found:
            strange.append(f"{entry.name} in addition to {found[name].name}")
        else:
            found[name] = entry
    strange += [f"{name} without the other factor" for name in found if _other(name) not in found]
    if strange or not found:
        shown = ", ".join(strange[:_SHOWN]) or "no tensors"
        raise ConfigError(
            f"{path}: expected pairs <module>.lora_A.weight and <module>.lora_B.weight of one adapter of the "
            f"transformer, found {shown}{f' and {len(strange) - _SHOWN} more' if len(strange) > _SHOWN else ''}; "
            "load it in the stock pipeline, and write it by save_lora_weights"
        )
    return AdapterFile(path, found)


def settings(file: AdapterFile, shapes: sizes.Shapes, given_alpha: float | None) -> LoraConfig:
    """Return the settings of an adapter of a transformer whose weights have these ``shapes``.

    Ranks follow from the tensors. Alpha is stated in the file or next to it, or else it is ``given_alpha``. Raises
    :class:`ConfigError` if no place states it or two contradict each other, for settings that change what the tensors
    mean, and for tensors that do not fit the transformer.
    """
    ranks = file.ranks
    _check_shapes(file, matrices_of(shapes))
    stated, place = _stated(file.path)
    if unknown := [name for name in ("use_dora", "lora_bias") if stated.get(name)]:
        raise ConfigError(f"{place} sets {', '.join(unknown)}, which is not supported; fuse it into the pipeline")
    alpha = stated.get("lora_alpha", given_alpha)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0:
        raise ConfigError(
            f"{file.path} does not state its alpha, nor does a {CONFIG} next to it (cosmos-rl's files of adapters do "
            f"not): set policy.init_alpha, the lora_alpha that it was trained with (its rank is {max(ranks.values())})"
        )
    if given_alpha not in (None, alpha):
        raise ConfigError(f"policy.init_alpha = {given_alpha:g}, but {place} states {alpha:g}; leave init_alpha out")
    try:
        written = LoraConfig(lora_alpha=float(alpha), alpha_pattern=stated.get("alpha_pattern") or {})
    except ValidationError as error:
        raise ConfigError(f"{place}: its alpha_pattern is not numbers by patterns: {error}") from error
    return lora.of_modules(
        ranks,
        {module: lora.alpha(written, module) for module in ranks},
        lora.suffixes_of(ranks, shapes),
        use_rslora=bool(stated.get("use_rslora")),
    )


def _check_shapes(file: AdapterFile, matrices: sizes.Shapes) -> None:
    """Raise :class:`ConfigError` unless each pair of factors fits the matrix of its module."""
    wrong: list[str] = []
    for module, rank in file.ranks.items():
        a, b = (file.entries[f"{module}.lora_{side}.weight"].shape for side in "AB")
        if module not in matrices:
            wrong.append(f"it has no linear module {module}")
        elif (b, a) != ((matrices[module][0], rank), (rank, matrices[module][1])):
            wrong.append(f"{module} is {list(matrices[module])}, its factors are {list(b)} and {list(a)}")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(f"{file.path} does not fit this transformer: {'; '.join(wrong[:_SHOWN])}{more}")


def _stated(path: Path) -> tuple[dict[str, Any], str]:
    """Return the settings in the tensors' file or next to it, without prefixes, and their place; empty if absent."""
    with safe_open(path, framework="np") as stored:
        metadata: dict[str, str] = stored.metadata() or {}
    config = path.with_name(CONFIG)
    for place, text in (
        (f"the metadata of {path}", metadata.get(METADATA)),
        (str(config), config.read_text(encoding="utf-8") if config.is_file() else None),
    ):
        if text is None:
            continue
        try:
            values = from_json(text)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{place} is not a table of settings")
        return {name.removeprefix(_PREFIXES[0]): value for name, value in values.items()}, place
    return {}, ""


def _plain(name: str) -> str | None:
    """Return a tensor's name without prefixes and adapter; None if it is no factor of an adapter of the transformer."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if (found := _NAME.fullmatch(name)) is None or ".lora_" in found["module"]:
        return None
    return f"{found['module']}.lora_{found['side']}.weight"


def _other(name: str) -> str:
    here, there = ("lora_A", "lora_B") if ".lora_A." in name else ("lora_B", "lora_A")
    return there.join(name.rsplit(here, 1))
