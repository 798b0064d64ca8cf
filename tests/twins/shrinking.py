"""What a twin changes in a recipe and its profile: weights, sizes, data and numbers of samples, never an algorithm."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from cosmos_rl_core import plugins
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.reading import Values
from cosmos_rl_core.config.vlm.recipe import VLM_SFT
from cosmos_rl_core.recipes.reading import launch_of, read_values
from tests.test_rules import ROOT
from tests.twins.inputs import HELD_OUT, SIZE, VIDEO_FRAMES, Inputs

FAMILIES = {
    "stable-diffusion-3.5": "sd3",
    "SANA-Video": "sana_video",
    "SANA1.5": "sana",
    "Cosmos": "cosmos_predict2_5",
    "Wan2.1-I2V": "wan_i2v",
    "Wan2.1": "wan",
    "Wan2.2-TI2V-5B": "wan",
    "Z-Image": "z_image",
    "FLUX.2-klein": "flux2_klein",
    "Qwen-Image-Edit": "qwen_image_edit",
}
"""Model plugins by a part of the name of their weights."""
OPTIONS = {"Wan2.2-TI2V-5B": {"expand_timesteps": True}}
"""Options of tiny pipelines by a part of the name of their weights."""
MOST_RANKS = 4
PREPARATION = ("tiny", "data")
"""Folders of configs/ that hold no recipe of real weights."""
GROUP, PROMPTS = 3, 2
"""Samples of a prompt and prompts of an iteration: they divide evenly among no number of ranks but one."""
CONVERSATIONS = 8
"""Conversations of an optimizer step: a multiple of the ranks, as VLMs need."""
LORA_RANK = 2


@dataclass(frozen=True)
class Twin:
    """A deployment that trains with a profile, as a tiny machine runs it."""

    name: str
    """Name of the deployment in Prefect, such as ``ddrl/14b``."""
    recipe: str
    cluster: str
    ranks: int
    overrides: tuple[str, ...] = ()
    """Values of ``--set``."""
    asks_service: bool = False
    """Whether a reward service scores its samples."""


def deployed() -> dict[str, dict[str, Any]]:
    """Return the parameters of every deployment with a recipe, by its name in Prefect."""
    entries = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    with_recipe = (entry for entry in entries if "recipe" in entry.get("parameters", {}))
    return {f"{entry['entrypoint'].rpartition('.')[2]}/{entry['name']}": entry["parameters"] for entry in with_recipe}


def profiled() -> dict[str, dict[str, Any]]:
    """Return the deployments with a cluster profile. Each has a twin."""
    return {name: given for name, given in deployed().items() if "cluster" in given}


def twin_of(name: str, inputs: Inputs) -> Twin:
    """Return the twin of a deployment. Its weights and data are written where ``inputs`` says."""
    given = profiled()[name]
    recipe, cluster = given["recipe"], given["cluster"]
    values, launch = read_values(recipe), scaled(launch_of(cluster))
    is_vlm = values["train"]["train_policy"]["type"] == VLM_SFT
    changes = vlm(values, inputs) if is_vlm else tiny(values, inputs) | small(values, inputs)
    changes |= {"train.num_iterations": 1, "logging.logger": ["console"]} | launch
    asks = any(reward["fn"]["name"] == "remote" for reward in values.get("rewards", []))
    return Twin(name, recipe, cluster, launch["launch.processes"], settings(changes), asks)


def scaled(launch: LaunchConfig) -> dict[str, Any]:
    """Return the changes that put a profile on at most four ranks of a machine without GPUs.

    Shards and context-parallel ranks are the largest divisors of the ranks that are not above the profile's.
    """
    ranks = min(MOST_RANKS, launch.processes)
    # Processes that stay, as on the profile's GPUs.
    stays = {"launch.resident_gb": launch.resident_gb or 1} if launch.mode == "warm" else {}
    return stays | {
        "launch.processes": ranks,
        "launch.dp_shard_size": divisor(ranks, launch.dp_shard_size),
        "launch.cp_size": divisor(ranks, launch.cp_size),
        "launch.threads": 1,
        "launch.device": "cpu",
        "launch.gpus": ranks,
    }


def divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number that is at most ``most``."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= most)


def tiny(values: Values, inputs: Inputs) -> dict[str, Any]:
    """Return the changes that take a diffusion recipe to a tiny model, small media and data of this machine."""
    name = family(values)
    frames = VIDEO_FRAMES if values["policy"]["diffusers"]["train_frames"] > 1 else 1
    changes: dict[str, Any] = {
        "policy.model_name_or_path": str(inputs.pipeline(name, **_options(values))),
        "policy.diffusers.inference_size": SIZE,
        "policy.diffusers.train_frames": frames,
    }
    if "lora" in values["policy"]:
        changes["policy.lora.r"] = LORA_RANK
    if name == "cosmos_predict2_5":
        changes["policy.diffusers.guardrail"] = "off"
    policy = values["train"]["train_policy"]
    places = {"train.train_policy.dataset": policy["dataset"], "train.train_policy.data": policy.get("data")}
    places["validation.dataset"] = values.get("validation", {}).get("dataset")
    for place, dataset in places.items():
        if dataset and dataset["name"] == "prompts" and refers(values):
            held_out = place.startswith("validation")
            changes[f"{place}.path"] = str(inputs.edits(HELD_OUT if held_out else 0))
        elif dataset and dataset["name"] == "prompts":
            changes[f"{place}.path"] = str(inputs.prompts)
        elif dataset and dataset["name"] == "prompt_set":
            # The one set whose number of prompts is not known.
            changes |= {f"{place}.set": "ocr", f"{place}.local_dir": str(inputs.prompt_set)}
        elif dataset:
            changes |= {f"{place}.size": SIZE, f"{place}.frames": frames}
            if dataset["name"] == "local":
                changes[f"{place}.local_dir"] = str(inputs.media(kind_of_media(values)))
    rewards = values.get("rewards", [])
    if any(has_weights(reward["fn"]["name"]) or "url" in reward["fn"] for reward in rewards):
        changes["rewards"] = [reward | {"fn": tiny_judge(reward["fn"], inputs)} for reward in rewards]
    return changes


def small(values: Values, inputs: Inputs) -> dict[str, Any]:
    """Return the changes that leave a few samples and steps of an iteration, and an evaluation of both policies."""
    policy, rollout = values["train"]["train_policy"], values.get("rollout", {})
    validation: dict[str, Any] = {"freq": 1, "n_generation": 1, "batch_size": 2}
    held_out = inputs.edits(HELD_OUT) if refers(values) else inputs.prompts
    validation["dataset"] = {"name": "prompts", "path": str(held_out)}
    changes: dict[str, Any] = {"policy.diffusers.sample.eval_num_steps": 4, "validation": validation}
    changes["train.train_policy.mini_batch"] = min(2, policy["mini_batch"])
    if "steps_per_iteration" in policy:
        kind = kind_of_media(values)
        held_out, frames = inputs.media(kind, HELD_OUT), VIDEO_FRAMES if kind == "clips" else 1
        validation["data"] = {"name": "local", "local_dir": str(held_out), "size": SIZE, "frames": frames}
        return changes | {"train.train_policy.steps_per_iteration": 3}
    changes |= {"train.train_batch_per_replica": GROUP * PROMPTS, "rollout.n_generation": GROUP}
    for key, most in (("n_generation_mini_batch", 2), ("samples_per_shard", 2)):
        changes[f"rollout.{key}"] = min(most, rollout.get(key, most))
    return changes


def vlm(values: Values, inputs: Inputs) -> dict[str, Any]:
    """Return the changes that take a recipe of a VLM to a tiny model and a few conversations, some held out."""
    changes: dict[str, Any] = {
        "policy.model_name_or_path": str(inputs.vlm),
        "train.train_batch_per_replica": CONVERSATIONS,
        "train.train_policy.steps_per_iteration": 3,
    }
    if "video" in values["policy"].get("media", {}):
        # Pixels of all frames. The recipes' bounds would enlarge each clip to a thousand tokens.
        changes["policy.media.video.size"] = {"shortest_edge": 512, "longest_edge": 4096}
    if "lora" in values["policy"]:
        changes["policy.lora.r"] = LORA_RANK
    held_out: dict[str, Any] = {}
    for name, options in values["train"]["train_policy"]["datasets"].items():
        places = inputs.conversations(options["name"])
        changes |= {f"train.train_policy.datasets.{name}.{key}": str(value) for key, value in places.items()}
        held_out[name] = options | {key: str(value) for key, value in places.items()}
    changes["validation"] = {"max_new_tokens": 2, "freq": 1, "datasets": held_out}
    return changes


def family(values: Mapping[str, Any]) -> str:
    """Return the model plugin of a recipe."""
    name = values["policy"]["model_name_or_path"]
    return next(family for part, family in FAMILIES.items() if part in name)


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    name = values["policy"]["model_name_or_path"]
    return next((options for part, options in OPTIONS.items() if part in name), {})


def refers(values: Mapping[str, Any]) -> bool:
    """Return whether the prompts of a recipe have references: its files of prompts have lines of objects."""
    policy, validation = values["train"]["train_policy"], values.get("validation", {})
    datasets = [policy.get("dataset", {}), validation.get("dataset", {})]
    return any(str(dataset.get("path", "")).endswith(".jsonl") for dataset in datasets)


def kind_of_media(values: Mapping[str, Any]) -> str:
    """Return the kind of the media that a recipe trains on."""
    if values["policy"]["diffusers"]["train_frames"] > 1:
        return "clips"
    return "edits" if refers(values) else "pictures"


def has_weights(reward: str) -> bool:
    """Return whether a reward computes with torch."""
    return plugins.load("rewards", reward).Options.facts.torch


def tiny_judge(fn: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
    """Return the settings of a reward, on tiny weights if it has any, or behind a service of this machine."""
    if "url" in fn:
        return fn | {"url": f"http://127.0.0.1:{inputs.judge_port}/v1"}
    return fn | inputs.scorer(fn["name"]) if has_weights(fn["name"]) else fn


def settings(changes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return changes as values of ``--set``."""
    return tuple(f"{key}={inline(value)}" for key, value in changes.items())


def inline(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {inline(held)}' for key, held in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(inline, value))}]"
    return json.dumps(value)
