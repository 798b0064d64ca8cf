"""LoRA files for ComfyUI: their names, and strengths that equal the policy's, also as stock diffusers reads Wan's."""

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from cosmos_rl_core import plugins
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import family_of, moved, stock_pipeline, tensors_of
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.exporters.comfyui import lora_file
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import prepare
from cosmos_rl_core.weights.shapes import weight_shapes

READ = ("sd3", "flux", "qwen_image", "z_image", "wan")
COMFYUI = "COMFYUI"
"""Environment variable with a checkout of ComfyUI, of which nothing is kept here."""
TABLES = {
    "sd3": ("mmdit_to_diffusers", {"depth": 24}),
    "flux": ("flux_to_diffusers", {"depth": 19, "depth_single_blocks": 38, "hidden_size": 3072}),
    "z_image": ("z_image_to_diffusers", {"n_layers": 30, "dim": 3840, "n_refiner_layers": 2}),
}
"""The functions that list diffusers' names, and the sizes that they read."""
SUFFIXES = {
    "z_image": ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0", "w1", "w2", "w3"),
    "flux": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "to_add_out", "net.2", "proj_mlp"),
}
USUAL = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")


def config_of(name: str) -> LoraConfig:
    """One whose modules have different ranks and strengths."""
    return LoraConfig(
        r=4,
        lora_alpha=12.0,
        use_rslora=True,
        target_modules=SUFFIXES.get(name, USUAL),
        r_pattern={"to_q": 2},
        alpha_pattern={"to_k": 3.0},
    )


def exported(name: str, folder: Path) -> tuple[bytes, dict[str, Any], dict[str, torch.Tensor]]:
    """The file of an export, its settings, and what each adapter adds to its module."""
    family = family_of(name, folder)
    model = family.load("transformer")
    weights = prepare(model.transformer, config_of(name), reference=False)
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), 0.2))
    tensors = tensors_of(weights, CURRENT)
    files = {path: b"".join(chunks) for path, chunks in export.lora_files(tensors, config_of(name))}
    layers: dict[str, Any] = dict(model.transformer.named_modules())
    added = {
        module: layers[module].get_delta_weight("default").detach().cpu()
        for module in {tensor.rpartition(".lora_")[0] for tensor in tensors}
    }
    return files["lora/model.safetensors"], json.loads(files["lora/adapter_config.json"]), added


def named(name: str) -> Any:
    return plugins.load("models", name).SPEC.comfyui


@pytest.mark.parametrize("name", READ)
def test_every_module_is_as_strong_as_in_the_policy(name: str, tmp_path: Path):
    data, settings, added = exported(name, tmp_path)
    spec = named(name)
    made = load(lora_file(data, settings, spec))
    assert {key.rpartition(".lora_")[0] or key.removesuffix(".alpha") for key in made} == {spec(one) for one in added}
    for module, expected in added.items():
        up, down = (made[f"{spec(module)}.lora_{side}.weight"] for side in "BA")
        # As ComfyUI computes it.
        found = made[f"{spec(module)}.alpha"].item() / down.shape[0] * (up @ down)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), module
    # The library reads and would write the same bytes.
    assert save(made, {"format": "pt"}) == lora_file(data, settings, spec)


def test_stock_diffusers_which_reads_files_of_wan_too_adds_the_same(tmp_path: Path):
    name = "wan"
    data, settings, added = exported(name, tmp_path / "made")
    file = tmp_path / "lora.safetensors"
    file.write_bytes(lora_file(data, settings, named(name)))
    stock = stock_pipeline(str(family_of(name, tmp_path / "stock").folder))
    stock.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="ours")
    layers: dict[str, Any] = dict(stock.transformer.named_modules())
    for module, expected in added.items():
        found = layers[module].get_delta_weight("ours").detach().cpu()
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), module


def test_a_module_that_comfyui_has_no_name_for_is_refused_by_name():
    tensors = {f"transformer.proj_out.lora_{side}.weight": torch.zeros(2, 2, device="cpu") for side in "AB"}
    with pytest.raises(ConfigError, match=r"reads no adapter of proj_out; train a LoRA of attention"):
        lora_file(save(tensors), {"r": 2, "lora_alpha": 2.0}, named("sd3"))


@pytest.mark.parametrize("name", TABLES)
def test_comfyui_itself_lists_the_names(name: str, tmp_path: Path):
    if not (checkout := os.environ.get(COMFYUI)):
        pytest.skip(f"needs a checkout of ComfyUI, which the environment variable {COMFYUI} names")
    tree = ast.parse(Path(checkout, "comfy", "utils.py").read_text(encoding="utf-8"))
    function, sizes = TABLES[name]
    wanted: list[ast.stmt] = [
        node
        for node in tree.body
        if (isinstance(node, ast.Assign) and all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets))
        or (isinstance(node, ast.FunctionDef) and node.name in (function, "swap_scale_shift"))
    ]
    known: dict[str, Any] = {"torch": torch}
    # Its tables alone: the module imports what a checkout needs.
    exec(compile(ast.Module(wanted, []), "utils", "exec"), known)
    listed = {f"transformer.{key.removesuffix('.weight')}" for key in known[function](sizes)}
    spec = named(name)
    modules = {tensor.removesuffix(".weight") for tensor in weight_shapes(str(tiny_pipelines.save(name, tmp_path)))}
    ours = {found for module in modules if (found := spec(module)) is not None}
    assert ours
    assert ours <= listed
