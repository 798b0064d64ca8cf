"""Bases that are distilled to few steps: what plans say of them."""

import json
from pathlib import Path

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.pipelines.distilled import sign_of
from flows.explaining.explain import explain_plan
from flows.planning.plan import Settings, plan_of

ROOT = Path(__file__).parents[3]


def told(folder: Path, algorithm: str) -> str:
    recipe = str(ROOT / "configs" / "tiny" / f"{algorithm}.toml")
    plan = plan_of(Settings(recipe, overrides=(f"policy.model_name_or_path={folder}",)))
    return explain_plan(plan, "outputs")


def test_losses_on_noised_samples_are_warned_of_and_policy_gradients_are_not(tmp_path: Path):
    folder = tiny_pipelines.save("sd3", tmp_path / "tiny-sd3-turbo")
    said = told(folder, "nft")
    assert "distilled  the base seems to be distilled to few steps (the name has 'turbo'); nft trains" in said
    assert "take the model that it was distilled from" in said
    assert "distilled" not in told(folder, "grpo").replace("tiny-sd3-turbo", "")


def test_a_base_without_signs_of_distillation_gets_no_warning(tmp_path: Path):
    assert "distilled" not in told(tiny_pipelines.save("sd3", tmp_path / "sd3"), "nft")


@pytest.mark.parametrize(
    ("name", "sign"),
    [
        ("Tongyi-MAI/Z-Image-Turbo", "the name has 'turbo'"),
        ("black-forest-labs/FLUX.1-schnell", "the name has 'schnell'"),
        ("models/sd3-4step", "the name has '4step'"),
        ("turbo/stable-diffusion-3.5-medium", ""),
        ("models/turbocharged", ""),
        ("models/sd3-40steps", ""),
        ("models/sd3-28steps", ""),
        ("models/z-image-turbo/", "the name has 'turbo'"),
        ("/hub/models--Tongyi-MAI--Z-Image-Turbo/snapshots/0a1b", "the name has 'turbo'"),
    ],
)
def test_only_whole_words_of_a_name_are_signs_of_distillation(name: str, sign: str, tmp_path: Path):
    assert sign_of(name, tiny_pipelines.save("sd3", tmp_path / "sd3")) == sign


def test_a_setting_of_the_pipeline_is_a_sign_of_distillation(tmp_path: Path):
    folder = tiny_pipelines.save("flux2_klein", tmp_path / "klein")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}), encoding="utf-8")
    assert sign_of("klein", folder) == "is_distilled = true"
