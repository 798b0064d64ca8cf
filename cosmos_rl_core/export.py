"""Weights as the stock diffusers pipelines read them: a LoRA file, or a complete pipeline directory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors import torch as safetensors_torch
from torch import Tensor

from cosmos_rl_core import lora, pipelines
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ArtifactError


def lora_files(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, bytes]:
    """Adapter tensors (a policy part) as files by relative path, for the stock
    ``load_lora_weights(folder, weight_name="model.safetensors", adapter_name="default")``.

    Rank and alpha, of single modules too, travel in the file's one metadata entry: without it diffusers takes the rank
    for alpha, and the adapter has the wrong strength. ``adapter_config.json`` says the same for other readers.
    """
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    settings = lora.peft_settings(config, lora.targets(config, adapted))
    metadata = json.dumps(
        {f"{pipelines.TRANSFORMER}.{name}": value for name, value in settings.items()}, sort_keys=True
    )
    named = {f"{pipelines.TRANSFORMER}.{name}": tensors[name].contiguous() for name in sorted(tensors)}
    adapter_config = {"peft_type": "LORA", "bias": "none", "inference_mode": True, **settings}
    return {
        "lora/model.safetensors": safetensors_torch.save(named, metadata={"lora_adapter_metadata": metadata}),
        "lora/adapter_config.json": (json.dumps(adapter_config, indent=2, sort_keys=True) + "\n").encode(),
    }


def full_pipeline(base: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, bytes | Path]]:
    """The pipeline directory ``base`` with transformer weights replaced by ``tensors`` (a full fine-tuning part).

    Yields relative paths with their bytes, or with the file of ``base`` to copy. The transformer keeps base's cut into
    files, its number types and every tensor that is not trained, such as buffers. Other spellings of its weights
    (pickles, half-precision variants) would still be the base model's and are left out. One file is in memory at once.
    """
    weights = pipelines.transformer_files(base)
    stored = {name: file for file in weights for name in _names(Path(base, pipelines.TRANSFORMER, file))}
    unknown = sorted(tensors.keys() - stored.keys())
    if unknown:
        raise ArtifactError(f"{len(unknown)} tensors have no place in the transformer of {base!r}, e.g. {unknown[0]}")
    copied = {"config.json"} if weights == [pipelines.WEIGHTS] else {"config.json", f"{pipelines.WEIGHTS}.index.json"}
    for name in pipelines.pipeline_files(base):
        folder, _, file = name.partition("/")
        if folder != pipelines.TRANSFORMER or file in copied:
            yield name, Path(base, name)
        elif file in weights:
            yield name, _replaced(Path(base, name), tensors)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as stored:
        return list(stored.keys())


def _replaced(file: Path, tensors: Mapping[str, Tensor]) -> bytes:
    merged = safetensors_torch.load_file(file)
    for name in merged.keys() & tensors.keys():
        if merged[name].shape != tensors[name].shape:
            raise ArtifactError(f"{name} is {list(tensors[name].shape)}, expected {list(merged[name].shape)}")
        merged[name] = tensors[name].to("cpu", merged[name].dtype).contiguous()
    return safetensors_torch.save(merged, metadata={"format": "pt"})
