"""Plans of shipped recipes with the settings of the published models, whose weights are not here."""

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.recipe import Recipe
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.recipes.reading import check, read_values
from flows.checking import room
from flows.sizes import costs, memory
from flows.sizes.basis import PLAIN, Basis
from tests.flows.true_configs import (
    KLEIN_4B,
    KLEIN_VAE,
    QWEN_IMAGE_EDIT,
    QWEN_VAE,
    WAN_1_3B,
    WAN_5B,
    WAN_5B_VAE,
    WAN_I2V_14B,
    WAN_VAE,
)
from tests.pages import ROOT
from tests.twins.shrinking import profiled

MILLION = 10**6


REFERRING: dict[str, tuple[str, dict[str, Any], tuple[dict[str, Any], dict[str, Any]], tuple[int, int], float]] = {
    "nft/flux2_klein_edit": ("flux2_klein", {}, (KLEIN_4B, KLEIN_VAE), (1024, 1024), 3.88),
    "sft/flux2_klein_edit_lora": ("flux2_klein", {}, (KLEIN_4B, KLEIN_VAE), (1024, 1024), 3.88),
    "nft/qwen_image_edit": ("qwen_image_edit", {}, (QWEN_IMAGE_EDIT, QWEN_VAE), (1024, 1024), 20.4),
    "nft/wan2_2_i2v": ("wan", {"expand_timesteps": True}, (WAN_5B, WAN_5B_VAE), (480, 832), 5.0),
    "nft/wan2_1_i2v": ("wan_i2v", {}, (WAN_I2V_14B, WAN_VAE), (480, 832), 16.4),
}
"""Model plugin, options of its tiny pipeline, true settings, a reference, and billions of weights, by the recipe."""


def true_sized(folder: Path, name: str, settings: tuple[dict[str, Any], dict[str, Any]], **options: Any) -> Path:
    """Write a pipeline without weights of transformer and VAE, whose settings are these."""
    tiny_pipelines.save(name, folder, **options)
    for part, values in zip(("transformer", "vae"), settings, strict=True):
        for weights in (folder / part).glob("*.safetensors"):
            weights.unlink()
        (folder / part / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wan 2.1 of 1.3 billion parameters, without weights."""
    return true_sized(tmp_path_factory.mktemp("true") / "wan", "wan", (WAN_1_3B, WAN_VAE))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERRING)
def test_recipes_of_references_fit_their_profiles_at_their_true_sizes(name: str, tmp_path: Path):
    """With a picture of about a megapixel, or of the video's size, on GPUs of 80 GB. Scorers are left out."""
    model, options, settings, picture, billions = REFERRING[name]
    folder = true_sized(tmp_path / name, model, settings, **options)
    (deployed,) = (given for given in profiled().values() if given["recipe"] == f"package:{name}")
    changes = [f"policy.model_name_or_path={folder}", "launch.device_memory_gb=79"]
    changes += ["rewards=[{fn={name='jpeg'}}]"] if name.startswith("nft") else []
    asked = check(read_values(str(ROOT / f"configs/{name}.toml"), changes, deployed["cluster"]), name)
    assert costs.parameters(asked)[0] == pytest.approx(billions * 10**9, rel=0.005)
    basis = Basis(pictures=(picture,))
    assert room.misfits(room.settled(asked, room.checkpointing(asked, basis)), basis) == []


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
def test_wan_on_small_gpus_is_refused_with_settings_that_make_it_fit(wan: Path):
    asked = recipe(wan, "eight-gpus", "launch.device_memory_gb=24")
    found = room.misfits(room.settled(asked, room.checkpointing(asked, PLAIN)), PLAIN)
    assert [message.partition(" needs ")[0] for message in found] == ["encode", "finetune", "evaluate"]
    assert all("it fits with launch.resident_gb = 0" in message for message in found)
