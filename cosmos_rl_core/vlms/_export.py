"""Exports of VLMs for transformers and peft. Files are yielded in chunks, and tensors are read one at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage.tensor_files import dtype_of, file_of, spec_of
from cosmos_rl_core.storage.tensor_headers import read_header
from cosmos_rl_core.vlms._folders import weight_files
from cosmos_rl_core.weights import lora

File = tuple[str, Iterable[bytes | memoryview]]
"""Relative path of a file, and its bytes in chunks."""
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5"}
"""Suffixes of files that hold the base's weights, and are not copied."""
PEFT = "base_model.model."
"""Prefix of the names of tensors in files of peft."""


def model_files(folder: str, tensors: Mapping[str, Tensor]) -> Iterator[File]:
    """Yield the files of the VLM in ``folder`` with its weights replaced by ``tensors`` (a policy part).

    Settings, tokenizer, processor and chat template are copied byte for byte. Weights keep the types of the base and
    its division into files. Raises :class:`ArtifactError` for tensors that the base does not have.
    """
    for file in sorted(Path(folder).iterdir()):
        if file.is_file() and file.suffix not in WEIGHTS and not file.name.startswith("."):
            yield file.name, [file.read_bytes()]
    entries = {name: _header(Path(folder, name)) for name in weight_files(folder)}
    known = {name: spec for specs in entries.values() for name, spec in specs.items()}
    if unknown := sorted(tensors.keys() - known.keys()):
        raise ArtifactError(
            f"the files of {folder!r} have no tensors for {len(unknown)} weights, e.g. {unknown[0]}; if an earlier "
            "version of transformers wrote them, load the model, save it again, and train from that folder"
        )
    for name, specs in entries.items():
        with safe_open(Path(folder, name), framework="pt") as stored:

            def merged(
                key: str, stored: safe_open = stored, specs: Mapping[str, tuple[str, tuple[int, ...]]] = specs
            ) -> Tensor:
                if key not in tensors:
                    return stored.get_tensor(key)
                dtype, shape = specs[key]
                if tuple(tensors[key].shape) != shape:
                    raise ArtifactError(f"{key} is {list(tensors[key].shape)}, expected {list(shape)}")
                return tensors[key].to("cpu", dtype_of(dtype))

            yield name, file_of(specs, merged, {"format": "pt"})


def adapter_files(tensors: Mapping[str, Tensor], config: LoraConfig) -> Iterator[File]:
    """Yield the files of an adapter as peft's ``PeftModel.from_pretrained`` reads them, given a policy part."""
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
    settings |= lora.peft_settings(config, sorted(adapted))
    specs = {PEFT + name: spec_of(tensors[name]) for name in sorted(tensors)}
    yield "adapter_model.safetensors", file_of(specs, lambda name: tensors[name.removeprefix(PEFT)], {"format": "pt"})
    yield "adapter_config.json", [(json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()]


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with file.open("rb") as stream:
        return {entry.name: (entry.dtype, entry.shape) for entry in read_header(stream)}
