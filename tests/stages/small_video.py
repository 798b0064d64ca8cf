"""A recipe of small videos, ``[C, T, H, W]``, and its iteration stage by stage."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.storage import media
from flows.planning import requests
from flows.planning.run import Run
from tests.hand_made import rewards
from tests.stages.conftest import make, make_on_ranks

LORA = {"r": 2, "lora_alpha": 4.0, "target_modules": ["to_q", "to_v"]}


def recipe(wan_path: str, prompt_dir: str, lora: dict[str, Any] | None) -> dict[str, Any]:
    policy: dict[str, Any] = {
        "model_name_or_path": wan_path,
        "diffusers": {
            "inference_size": [16, 16],
            "train_frames": 5,
            "max_prompt_length": 12,
            "sample": {"num_steps": 3, "guidance_scale": 2.0, "solver": "dpm2"},
        },
    }
    return {
        "policy": policy | ({"lora": lora} if lora else {}),
        "train": {
            "num_iterations": 2,
            "train_batch_per_replica": 6,
            "optm_lr": 1e-3,
            "ema_enable": True,
            "train_policy": {
                "type": "nft",
                "mini_batch": 2,
                "batch_size_per_optimize": 3,
                "timesteps_fraction": 0.67,
                "kl_beta": 0.01,
                "dataset": {"name": "ocr", "local_dir": prompt_dir},
            },
        },
        "rollout": {"n_generation": 3, "n_generation_mini_batch": 2, "samples_per_shard": 3},
        "rewards": [{"fn": {"name": "jpeg"}}],
    }


def ddrl_recipe(wan_path: str, prompt_dir: str, folder: Path) -> dict[str, Any]:
    """DDRL with EDM's sampler and a data term of one clip."""
    values = recipe(wan_path, prompt_dir, LORA)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    folder.mkdir(exist_ok=True)
    (folder / "0.mkv").write_bytes(media.encode(pixels)[1])
    (folder / "0.json").write_text(json.dumps({"prompt": "a clip"}), encoding="utf-8")
    values["policy"]["diffusers"]["sample"] = {"num_steps": 4, "guidance_scale": 2.0, "solver": "edm"}
    shape = {"size": [16, 16], "frames": 5}
    values["train"]["train_policy"] = {
        "type": "ddrl",
        "mini_batch": 2,
        "train_on": [0, 2],
        "data_beta": 0.1,
        "dataset": {"name": "ocr", "local_dir": prompt_dir},
        "data": {"name": "local", "local_dir": str(folder), **shape},
    }
    return values


def one_iteration(run: Run, tmp_path: Path, ranks: int) -> None:
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    step = (lambda r: make(r, tmp_path)) if ranks == 1 else (lambda r: make_on_ranks(r, tmp_path, ranks))
    step(requests.rollout(run, 0))
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, tmp_path)
    step(requests.update(run, 0))
