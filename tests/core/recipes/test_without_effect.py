"""Settings that nothing reads together with the others are refused, all at once."""

import copy
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.base import written
from cosmos_rl_core.config.recipe import KeepConfig, Recipe
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.recipes.reading import check, launch_of, read_values
from tests.test_rules import ROOT, SHIPPED_RECIPES

OCR = {"name": "ocr"}
MEDIA = {"name": "rendered_text", "num_items": 8}
KINDS: dict[str, dict[str, Any]] = {
    "nft": {"type": "nft", "dataset": OCR},
    "grpo": {"type": "grpo", "dataset": OCR, "train_on": [0]},
    "ddrl": {"type": "ddrl", "dataset": OCR, "data": MEDIA, "train_on": [0]},
    "sft": {"type": "sft", "dataset": MEDIA},
}
SLURM = {"launcher": "slurm", "slurm": {"partition": "a"}}
OTHER = {"stages": {"update": {"partition": "b"}}}
RAY = {"launcher": "ray", "kubernetes": {"image": "a"}}


def recipe(kind: str, *settings: tuple[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "policy": {"model_name_or_path": "package:tiny-sd3"},
        "train": {"num_iterations": 1, "train_batch_per_replica": 16, "train_policy": copy.deepcopy(KINDS[kind])},
        "rewards": [] if kind == "sft" else [{"fn": {"name": "jpeg"}}],
    }
    for name, value in settings:
        table = values
        *parents, last = name.split(".")
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
    return values


SAMPLE, TRAIN, POLICY = "policy.diffusers.sample", "train", "train.train_policy"
HELD_OUT = ("validation.dataset", {"name": "ocr", "split": "test"})
CASES: list[tuple[str, tuple[tuple[str, Any], ...], str]] = [
    ("nft", (("launch.mode", "warm"), ("launch.python", "/bin/python3")), "launch.python"),
    ("nft", (("launch.mode", "warm"), ("launch.device", "cpu"), ("launch.tf32", True)), "launch.tf32"),
    ("nft", (("launch.resident_gb", 1.0),), "launch.resident_gb"),
    ("nft", (("launch.slurm", {"partition": "a"}),), "launch.slurm"),
    ("nft", (("launch.kubernetes", {"image": "a"}),), "launch.kubernetes"),
    ("nft", (("launch", SLURM | {"kubernetes": {"image": "a"}}),), "launch.kubernetes"),
    ("nft", (("launch", RAY | {"slurm": {"nodes": 2}}),), "launch.slurm.nodes"),
    ("nft", (("launch", RAY | {"slurm": {"work_dir": "/x"}}),), "launch.slurm.work_dir"),
    ("nft", (("launch", SLURM | {"slurm": OTHER}),), "launch.slurm.stages.update.partition"),
    ("nft", (("launch.dp_shard_size", 8),), "launch.dp_shard_size = 8"),
    ("nft", ((f"{TRAIN}.optm_decay_ratio", 0.5),), "train.optm_decay_ratio"),
    ("nft", ((f"{TRAIN}.optm_min_lr_factor", 0.0),), "train.optm_min_lr_factor"),
    ("nft", ((f"{TRAIN}.max_num_steps", 5),), "train.max_num_steps"),
    ("nft", ((f"{TRAIN}.optm_warmup_start_factor", 0.5),), "train.optm_warmup_start_factor"),
    ("nft", ((f"{TRAIN}.ema_decay", 0.9),), "train.ema_decay"),
    ("nft", ((f"{TRAIN}.ema_enable", False), (f"{TRAIN}.ema_update_step_interval", 1)), "train.ema_update_step"),
    ("nft", ((f"{TRAIN}.ema_enable", True), (f"{TRAIN}.ema_rate", 0.1), (f"{TRAIN}.ema_decay", 0.9)), "train.ema_dec"),
    ("nft", (("policy.diffusers.logit_mean", 0.0),), "policy.diffusers.logit_mean"),
    ("grpo", (("policy.diffusers.logit_std", 1.0),), "policy.diffusers.logit_std"),
    ("ddrl", (("policy.diffusers.logit_mean", 0.5),), "policy.diffusers.logit_mean"),
    ("nft", (("policy.diffusers.weighting_scheme", "uniform"),), "policy.diffusers.weighting_scheme"),
    (
        "sft",
        (("policy.diffusers.weighting_scheme", "uniform"), ("policy.diffusers.logit_mean", 0.5)),
        "policy.diffusers.logit_mean",
    ),
    (
        "grpo",
        ((f"{SAMPLE}.solver", "edm"), (f"{SAMPLE}.s_churn", 0.0), (f"{SAMPLE}.s_noise", 1.0)),
        f"{SAMPLE}.s_noise",
    ),
    ("sft", ((f"{SAMPLE}.num_steps", 5), (f"{SAMPLE}.solver", "euler")), f"{SAMPLE}.num_steps, {SAMPLE}.solver"),
    ("sft", ((f"{SAMPLE}.guidance_scale", 2.0),), f"{SAMPLE}.guidance_scale"),
    ("sft", (("rollout.n_generation", 4),), "rollout.n_generation"),
    ("sft", (("rollout.n_generation_mini_batch", 4),), "rollout.n_generation_mini_batch"),
    ("sft", (("rollout.samples_per_shard", 4),), "rollout.samples_per_shard"),
    ("sft", (("validation.data", MEDIA), ("validation.n_generation", 2)), "validation.n_generation"),
    ("sft", (("rewards", [{"fn": OCR, "role": "monitor"}]),), "rewards (ocr).fn"),
    ("sft", (("validation.data", MEDIA), ("rewards", [{"fn": OCR, "role": "monitor"}])), "rewards (ocr).fn"),
    ("nft", (("rewards", [{"fn": {"name": "jpeg"}}, {"fn": OCR, "role": "monitor", "weight": 1.0}]),), "rewards (ocr)"),
]


@pytest.mark.parametrize(("kind", "settings", "says"), CASES, ids=[case[2] for case in CASES])
def test_a_setting_without_effect_is_refused(kind: str, settings: tuple[tuple[str, Any], ...], says: str):
    with pytest.raises(ConfigError) as caught:
        check(recipe(kind, *settings), "x.toml")
    _, *lines = str(caught.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"  {says}"), lines
    assert "without effect" in lines[0]


EFFECTIVE: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("nft", ()),
    ("sft", ()),
    ("nft", (("launch.mode", "cold"), ("launch.python", "/bin/python3"))),
    ("nft", (("launch.mode", "warm"), ("launch.resident_gb", 1.0), ("launch.tf32", True))),
    ("nft", (("launch", SLURM),)),
    ("nft", (("launch", RAY | {"slurm": OTHER}),)),
    ("nft", (("launch.processes", 2), ("launch.dp_shard_size", 2))),
    (
        "nft",
        ((f"{TRAIN}.optm_decay_type", "linear"), (f"{TRAIN}.max_num_steps", 5), (f"{TRAIN}.optm_decay_ratio", 0.5)),
    ),
    ("nft", ((f"{TRAIN}.optm_warmup_steps", 5), (f"{TRAIN}.optm_warmup_start_factor", 0.5))),
    ("nft", ((f"{TRAIN}.ema_enable", True), (f"{TRAIN}.ema_decay", 0.9))),
    ("sft", (("policy.diffusers.logit_mean", 0.5),)),
    ("ddrl", (("policy.diffusers.logit_mean", 0.5), (f"{POLICY}.use_rl_sigma_and_noise", False))),
    ("sft", (HELD_OUT, ("validation.n_generation", 2), ("validation.batch_size", 2), ("validation.seed", 1))),
    ("sft", (HELD_OUT, (f"{SAMPLE}.guidance_scale", 2.0), (f"{SAMPLE}.eval_num_steps", 2))),
    ("sft", (("validation.data", MEDIA), ("validation.batch_size", 2), ("validation.seed", 1))),
    ("nft", (("validation.data", MEDIA), ("validation.seed", 1))),
    ("sft", (HELD_OUT, ("rewards", [{"fn": OCR, "role": "monitor"}]), (f"{SAMPLE}.guidance_scale", 2.0))),
]


@pytest.mark.parametrize(("kind", "settings"), EFFECTIVE)
def test_the_same_settings_are_taken_where_something_reads_them(kind: str, settings: tuple[tuple[str, Any], ...]):
    assert check(recipe(kind, *settings), "x.toml").train.train_policy.type == kind


def test_all_settings_without_effect_are_named_with_other_impossible_combinations():
    settings = (
        ("train.ema_decay", 0.9),
        ("launch.slurm", {"partition": "a"}),
        ("policy.diffusers.logit_mean", 1.0),
        ("rollout.n_generation", 5),
    )
    with pytest.raises(ConfigError) as caught:
        check(recipe("nft", *settings), "x.toml")
    said = str(caught.value)
    assert all(f"{name} without effect" in said for name in ("train.ema_decay", "launch.slurm"))
    assert "policy.diffusers.logit_mean without effect" in said
    assert "train.train_batch_per_replica = 16 is not a multiple of rollout.n_generation = 5" in said


def test_a_recipe_that_was_written_out_whole_is_read_again():
    """A plan holds every field, also those that nobody set."""
    known = check(recipe("nft"), "x.toml")
    assert Recipe.model_validate_json(known.model_dump_json()) == known


def test_settings_without_effect_in_a_cluster_profile_are_refused_too(tmp_path: Path):
    profile = tmp_path / "x.toml"
    profile.write_text(
        '[launch]\nmode = "warm"\npython = "/bin/python3"\n[launch.slurm]\nnodes = 2\n', encoding="utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        launch_of(str(profile))
    first, second, third = str(caught.value).splitlines()
    assert first == f"{profile}:"
    assert second == "  launch.python without effect: mode = 'warm' starts the stages by the flow's interpreter"
    assert third == "  launch.slurm without effect: launcher = 'local'"


@pytest.mark.parametrize("path", sorted((ROOT / "deployments/clusters").glob("*.toml")), ids=lambda path: path.stem)
def test_every_profile_that_ships_is_taken(path: Path):
    assert launch_of(str(path)).launcher in ("local", "ray", "slurm")


@pytest.mark.parametrize("path", SHIPPED_RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_ships_is_taken(path: Path):
    assert check(read_values(str(path)), str(path)).train.num_iterations >= 1


def test_an_unknown_name_is_found_whatever_its_value():
    with pytest.raises(AssertionError, match="KeepConfig has no field pictures"):
        written(KeepConfig(), "media", "pictures")
