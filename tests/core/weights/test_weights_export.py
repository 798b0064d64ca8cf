"""Exports as files: their layout, their determinism, what they leave out and refuse.

That stock pipelines make the policy's media of them is tested in test_every_model_conforms.py.
"""

import json
import shutil
import struct

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors import torch as safetensors_torch

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import tensors_of, write_files
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.policy_weights import prepare

CPU = torch.device("cpu")
LORA = LoraConfig(r=4, lora_alpha=12.0)


@pytest.fixture(scope="session", params=["sd3", "wan"])
def folder(request, tmp_path_factory):
    return str(tiny_pipelines.save(request.param, tmp_path_factory.mktemp("export") / request.param))


@pytest.fixture(scope="session")
def trained(folder):
    """A transformer for each way of training, with weights that moved: (transformer, tensors) by name of the way."""
    result = {}
    for way, lora in (("lora", LORA), ("full", None)):
        transformer = load_model(folder, ("transformer",), CPU).transformer
        weights = prepare(transformer, lora)
        generator = torch.Generator("cpu").manual_seed(4)
        moved = {
            name: parameter.data + 0.2 * torch.randn(parameter.shape, generator=generator, device=CPU)
            for name, parameter in weights.parameters.items()
        }
        weights.load("current", moved)
        result[way] = (transformer, tensors_of(weights, "current"))
    return result


def stock(folder):
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True)


def header(content):
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size])


def contents(files):
    return {name: b"".join(chunks) for name, chunks in files}


def test_the_lora_file_is_deterministic_and_in_diffusers_layout(trained):
    _, tensors = trained["lora"]
    files = contents(export.lora_files(tensors, LORA))
    assert files == contents(export.lora_files(dict(reversed(tensors.items())), LORA))
    content = header(files["lora/model.safetensors"])
    metadata = content.pop("__metadata__")
    assert list(metadata) == ["lora_adapter_metadata"]
    assert set(content) == {f"transformer.{name}" for name in tensors}
    assert json.loads(files["lora/adapter_config.json"])["lora_alpha"] == 12.0
    named = {f"transformer.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    assert files["lora/model.safetensors"] == safetensors_torch.save(named, metadata)


def test_a_cut_transformer_stays_cut_and_stale_spellings_are_left_out(folder, trained, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    weights = base / "transformer/diffusion_pytorch_model.safetensors"
    tensors = safetensors_torch.load_file(weights)
    weights.rename(base / "transformer/diffusion_pytorch_model.fp16.safetensors")
    (base / "transformer/diffusion_pytorch_model.bin").write_bytes(b"stale")
    # Repositories of SD3.5 and FLUX.1 have the whole model in one file, too.
    (base / "sd3.5_medium.safetensors").write_bytes(b"stale")
    (base / "LICENSE.md").write_text("free")
    names = sorted(tensors)
    halves = {f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, members in halves.items():
        safetensors_torch.save_file({n: tensors[n] for n in members}, base / "transformer" / file, {"format": "pt"})
    places = {name: file for file, members in halves.items() for name in members}
    index = json.dumps({"metadata": {"total_size": 0}, "weight_map": places})
    (base / "transformer/diffusion_pytorch_model.safetensors.index.json").write_text(index)
    transformer, moved = trained["full"]
    write_files(export.full_pipeline(str(base), moved), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out/transformer").iterdir()) == sorted(
        ["config.json", "diffusion_pytorch_model.safetensors.index.json", *halves]
    )
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_file()} == {"model_index.json", "LICENSE.md"}
    loaded = stock(tmp_path / "out").transformer.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in transformer.state_dict().items())


def test_weights_of_another_model_are_refused(folder, trained, tmp_path):
    _, tensors = trained["lora"]
    with pytest.raises(ArtifactError, match="has no tensors for"):
        list(export.full_pipeline(folder, tensors))
    with pytest.raises(ArtifactError, match=r"proj_out\.bias is \[1\]"):
        write_files(export.full_pipeline(folder, {"proj_out.bias": torch.zeros(1, device=CPU)}), tmp_path)
