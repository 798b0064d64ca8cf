"""Plans of shipped recipes with the settings of the published models, whose weights are not here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.recipes.reading import check, read_values
from flows.checking import room
from flows.sizes import costs, memory
from flows.sizes.basis import PLAIN
from tests.pages import ROOT

WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "num_attention_heads": 12,
    "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256,
    "ffn_dim": 8960, "num_layers": 30, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6,
}  # fmt: skip
VAE: dict[str, Any] = {
    "_class_name": "AutoencoderKLWan", "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
    "attn_scales": [], "temperal_downsample": [False, True, True], "latents_mean": [0.0] * 16,
    "latents_std": [1.0] * 16,
}  # fmt: skip
MILLION = 10**6


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wan 2.1 of 1.3 billion parameters, without weights."""
    folder = tmp_path_factory.mktemp("true") / "wan"
    shutil.copytree(tiny_pipelines.save("wan", tmp_path_factory.mktemp("tiny") / "wan"), folder)
    for name, settings in (("transformer", WAN), ("vae", VAE)):
        for weights in (folder / name).glob("*.safetensors"):
            weights.unlink()
        (folder / name / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def recipe(folder: Path, profile: str, *overrides: str) -> Recipe:
    cluster = str(ROOT / "deployments/clusters" / f"{profile}.toml")
    given = [f"policy.model_name_or_path={folder}", *overrides]
    return check(read_values(str(ROOT / "configs/sft/wan_lora.toml"), given, cluster), "wan_lora")


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["eight-gpus", "eight-gpus-video"])
def test_wan_is_planned_at_its_true_size_and_fits(wan: Path, profile: str):
    asked = recipe(wan, profile)
    assert costs.parameters(asked)[0] == 1_418_996_800
    assert room.misfits(room.settled(asked, room.checkpointing(asked, PLAIN)), PLAIN) == []
    (encode,) = memory.stages(asked, ["encode"])
    assert encode.rows[memory.OTHERS].device == pytest.approx(4 * 127 * MILLION, rel=0.01)


@pytest.mark.slow
def test_wan_on_small_gpus_is_refused_with_what_makes_it_fit(wan: Path):
    asked = recipe(wan, "eight-gpus", "launch.device_memory_gb=24")
    found = room.misfits(room.settled(asked, room.checkpointing(asked, PLAIN)), PLAIN)
    assert [message.partition(" needs ")[0] for message in found] == ["encode", "finetune", "evaluate"]
    assert all("it fits with launch.resident_gb = 0" in message for message in found)
