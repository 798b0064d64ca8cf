"""The recipes of configs/ whose models are on a hub: as written, and planned on tiny models of the same classes."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from cosmos_rl_core import plugins
from cosmos_rl_core.config.recipe import check, launch_of, read_values
from cosmos_rl_core.config.toml import dumps
from cosmos_rl_core.importers.cosmos_rl import translation
from cosmos_rl_core.storage import media
from flows.operations.pools import GPUS
from flows.planning.plan import Plan, Settings, plan_of
from tests import tiny_pipelines, tiny_scorers
from tests.test_rules import HUB_RECIPES, ROOT

UPSTREAM = ROOT / "tests/core/upstream_recipes"
SIZE = [32, 64]
VIDEO_FRAMES = 9
FAMILIES = {
    "stable-diffusion-3.5": "sd3",
    "SANA-Video": "sana_video",
    "SANA1.5": "sana",
    "Cosmos": "cosmos_predict2_5",
    "Wan2.1": "wan",
}
SOURCES = {
    "ddrl/14b": "cosmos-predict2-5-14b-720-reason-embedding-ddrl",
    "ddrl/2b": "cosmos-predict2-5-2b-720-reason-embedding-ddrl",
    "grpo/2b": "cosmos-predict2-5-2b-480-grpo",
    "grpo/2b_mock": "cosmos-predict2-5-2b-480-grpo-mock-data",
    "nft/cosmos_2b": "cosmos-predict2-5-2b-720-nft",
    "nft/sana_image": "sana-image-nft",
    "nft/sana_video": "sana-video-nft",
    "nft/sd3": "stable-diffusion-3-5-medium-nft",
    "sft/sana_image": "sana-image-sft",
    "sft/sana_image_lora": "sana-image-sft-lora",
    "sft/sana_video": "sana-video-sft",
    "sft/sana_video_lora": "sana-video-sft-lora",
    "sft/sd3": "stable-diffusion-3-5-image-sft",
    "sft/sd3_lora": "stable-diffusion-3-5-image-sft-lora",
}
"""The recipe of cosmos-rl's that each of ours is; others have none."""
DEPLOYED = [
    entry["parameters"] for entry in yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())["deployments"]
]
OWN = ("local_dir", "path", "num_iterations", "store_budget_gb", "max_keep")
"""Settings that are the user's, or that a run here has and one of cosmos-rl's has not."""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


by_name = pytest.mark.parametrize("path", HUB_RECIPES, ids=name_of)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Folders of captioned pictures and clips, a file of prompts, and a set of them."""
    folder = tmp_path_factory.mktemp("data")
    for kind in ("pictures", "clips"):
        (folder / kind).mkdir()
    clip = media.encode(np.zeros((VIDEO_FRAMES, *SIZE, 3), dtype=np.uint8))[1]
    for index in range(16):
        caption = json.dumps({"prompt": f"number {index}"})
        Image.new("RGB", (SIZE[1], SIZE[0])).save(folder / f"pictures/{index}.png")
        (folder / f"pictures/{index}.json").write_text(caption, encoding="utf-8")
        (folder / f"clips/{index}.mkv").write_bytes(clip)
        (folder / f"clips/{index}.json").write_text(caption, encoding="utf-8")
    (folder / "set").mkdir()
    # The held-out part of the set ocr has a known number of lines.
    for name, count in {"prompts.txt": 64, "set/train.txt": 64, "set/test.txt": 1018}.items():
        lines = "\n".join(f"{Path(name).stem} {index}" for index in range(count))
        (folder / name).write_text(lines, encoding="utf-8")
    return {kind: folder / kind for kind in ("pictures", "clips", "prompts.txt", "set")}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A tiny pipeline of each class."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: tiny_pipelines.save(name, folder / name) for name in FAMILIES.values()}


def family(values: dict[str, Any]) -> str:
    name = values["policy"]["model_name_or_path"]
    return next(family for part, family in FAMILIES.items() if part in name)


def tiny(values: dict[str, Any], data: dict[str, Path], bases: dict[str, Path]) -> tuple[str, ...]:
    """What a tiny machine changes: the model, sizes, and where data are. Nothing that is an algorithm's."""
    name = family(values)
    frames = VIDEO_FRAMES if values["policy"]["diffusers"]["train_frames"] > 1 else 1
    changes: dict[str, Any] = {
        "policy.model_name_or_path": str(bases[name]),
        "policy.diffusers.inference_size": SIZE,
        "policy.diffusers.train_frames": frames,
    }
    if "lora" in values["policy"]:
        changes["policy.lora.r"] = 2
    if name == "cosmos_predict2_5":
        changes["policy.diffusers.guardrail"] = "off"
    policy = values["train"]["train_policy"]
    places = {"train.train_policy.dataset": policy["dataset"], "train.train_policy.data": policy.get("data")}
    places["validation.dataset"] = values.get("validation", {}).get("dataset")
    for place, dataset in places.items():
        if dataset and dataset["name"] == "prompts":
            changes[f"{place}.path"] = str(data["prompts.txt"])
        elif dataset and dataset["name"] == "prompt_set":
            # The one set whose number of prompts is not known.
            changes |= {f"{place}.set": "ocr", f"{place}.local_dir": str(data["set"])}
        elif dataset:
            changes |= {f"{place}.size": SIZE, f"{place}.frames": frames}
            if dataset["name"] == "local":
                changes[f"{place}.local_dir"] = str(data["clips" if frames > 1 else "pictures"])
    if "num_iterations" not in values["train"]:
        changes["train.num_iterations"] = 1
    rewards = values.get("rewards", [])
    if any(has_weights(reward["fn"]["name"]) for reward in rewards):
        changes["rewards"] = [reward | {"fn": tiny_judge(reward["fn"], data)} for reward in rewards]
    return tuple(f"{key}={inline(value)}" for key, value in changes.items())


def has_weights(reward: str) -> bool:
    return plugins.load("rewards", reward).Options.facts.torch


def tiny_judge(fn: dict[str, Any], data: dict[str, Path]) -> dict[str, Any]:
    """A reward, with torch on tiny weights."""
    folder = data["set"].parent / fn["name"]
    return fn | tiny_scorers.settings(fn["name"], folder) if has_weights(fn["name"]) else fn


def inline(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {inline(held)}' for key, held in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return json.dumps(value)


def planned(path: Path, data: dict[str, Path], bases: dict[str, Path], cluster: str | None = None) -> Plan:
    values = translation.translated(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    # Tiny models have two attention heads, for as many peers.
    peers = () if cluster is None else (f"launch.cp_size={min(launch_of(cluster).cp_size, 2)}",)
    return plan_of(Settings(str(path), overrides=tiny(values, data, bases) + peers, cluster=cluster))


def settings(values: Any, name: str = "") -> dict[str, Any]:
    """Dotted names and values; JSON's types, so that 4 and 4.0 are one."""
    if isinstance(values, dict):
        return {
            key: held for part in values for key, held in settings(values[part], f"{name}.{part}".strip(".")).items()
        }
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return settings(dict(zip(map(str, range(len(values))), values, strict=True)), name)
    return {name: values}


@by_name
def test_its_settings_are_valid(path: Path):
    recipe = check(read_values(str(path)), str(path))
    assert recipe.train.train_policy.type == path.parent.name


@pytest.mark.parametrize("path", [path for path in HUB_RECIPES if name_of(path) in SOURCES], ids=name_of)
def test_it_has_the_values_of_cosmos_rls(path: Path):
    ours = settings(tomllib.loads(path.read_text(encoding="utf-8")))
    theirs = settings(
        translation.translate(tomllib.loads((UPSTREAM / f"{SOURCES[name_of(path)]}.toml").read_text())).values
    )
    different = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    unexpected = {name for name in different if name.rpartition(".")[2] not in OWN}
    if name_of(path) == "grpo/2b_mock":  # a smoke test that needs no service
        unexpected = {name for name in unexpected if not name.startswith("rewards.")}
    assert not unexpected


@by_name
def test_it_plans_as_deployed_on_a_tiny_model_of_the_same_class(path: Path, data, bases):
    (deployed,) = (found for found in DEPLOYED if found.get("recipe") == f"package:{name_of(path)}")
    plan = planned(path, data, bases, deployed["cluster"])
    assert plan.recipe.launch.gpu_limit == GPUS
    assert plan.model.adapter == family(tomllib.loads(path.read_text(encoding="utf-8")))
    assert len(plan.prompts) >= plan.recipe.prompts_per_iteration
    assert bool(plan.data_prompts) == (getattr(plan.recipe.train.train_policy, "data", None) is not None)


@pytest.mark.parametrize("name", sorted(SOURCES.values()))
def test_cosmos_rls_own_file_plans_and_so_does_what_it_is_translated_to(name: str, data, bases, tmp_path):
    upstream, ours = UPSTREAM / f"{name}.toml", tmp_path / f"{name}.toml"
    values = translation.translate(tomllib.loads(upstream.read_text(encoding="utf-8"))).values
    ours.write_text(dumps(values), encoding="utf-8")
    assert translation.schema_of(tomllib.loads(ours.read_text(encoding="utf-8"))) is None
    overrides = list(tiny(values, data, bases))
    assert check(read_values(str(ours), overrides), "ours") == check(read_values(str(upstream), overrides), "upstream")
    assert planned(upstream, data, bases).prompts
