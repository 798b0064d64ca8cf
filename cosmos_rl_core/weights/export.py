"""Exports for the stock diffusers pipelines: a LoRA file, or a complete pipeline directory.

Files are yielded in chunks and tensors are read one at a time, so that a model is never in memory as a whole.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.base_weights import BaseWeights
from cosmos_rl_core.storage.tensor_files import dtype_of, file_of, spec_of
from cosmos_rl_core.storage.tensor_headers import num_bytes
from cosmos_rl_core.weights import lora

File = tuple[str, Iterable[bytes | memoryview]]
"""Relative path of a file, and its bytes in chunks."""

_COPIED_BYTES = 2**23
_WHOLE_MODELS = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
"""Ends of names of files next to ``model_index.json`` that other programs read a whole model from."""


def lora_files(tensors: Mapping[str, Tensor], config: LoraConfig) -> Iterator[File]:
    """Yield the files of a LoRA export, given its tensors (a policy part).

    Stock diffusers reads them by
    ``load_lora_weights(folder, weight_name="model.safetensors", adapter_name="default")``.
    Rank and alpha, also for single modules, are in the file's one metadata entry. Without it diffusers would set
    alpha to the rank, and the adapter would have the wrong strength. ``adapter_config.json`` holds the same values for
    other readers. Each tensor is read twice: for the file's header and for its bytes.
    """
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    settings = lora.peft_settings(config, lora.targets(config, adapted))
    prefix = f"{directories.TRANSFORMER}."
    metadata = json.dumps({prefix + name: value for name, value in settings.items()}, sort_keys=True)
    specs = {prefix + name: spec_of(tensors[name]) for name in tensors}
    adapter_config = {"peft_type": "LORA", "bias": "none", "inference_mode": True, **settings}
    file = file_of(specs, lambda name: tensors[name.removeprefix(prefix)], {"lora_adapter_metadata": metadata})
    yield "lora/model.safetensors", file
    yield "lora/adapter_config.json", [_json(adapter_config)]


def full_pipeline(base: str, tensors: Mapping[str, Tensor]) -> Iterator[File]:
    """Yield the files of the pipeline ``base`` with transformer weights replaced by ``tensors`` (a policy part).

    The transformer keeps the types of the base, its division into files, and every tensor that is not trained, such as
    buffers. Other files with its weights (pickles, half-precision variants, a whole model in one file) are left out,
    because they would still hold the base model's weights.

    Raises :class:`ArtifactError` for tensors that the base does not have, or that have other shapes there.
    """
    weights = BaseWeights(base, {})
    if unknown := sorted(tensors.keys() - weights.specs.keys()):
        raise ArtifactError(f"the transformer of {base!r} has no tensors for {len(unknown)} weights, e.g. {unknown[0]}")
    for name in directories.pipeline_files(base):
        folder, _, file = name.partition("/")
        is_whole_model = not file and name.endswith(_WHOLE_MODELS)
        if file == "config.json" or (folder != directories.TRANSFORMER and not is_whole_model):
            yield name, _copied(Path(base, name))

    def merged(name: str) -> Tensor:
        if name not in tensors:
            return weights.stored(name)
        tensor, (dtype, shape) = tensors[name], weights.specs[name]
        if tuple(tensor.shape) != shape:
            raise ArtifactError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")
        return tensor.to("cpu", dtype_of(dtype))

    for file, names in weights.files.items():
        specs = {name: weights.specs[name] for name in names}
        yield f"{directories.TRANSFORMER}/{file}", file_of(specs, merged, {"format": "pt"})
    if list(weights.files) != [directories.WEIGHTS]:
        places = {name: file for file, names in weights.files.items() for name in names}
        total = sum(num_bytes(*spec) for spec in weights.specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        yield f"{directories.TRANSFORMER}/{directories.WEIGHTS}.index.json", [_json(index)]


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _copied(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_COPIED_BYTES):
            yield block
