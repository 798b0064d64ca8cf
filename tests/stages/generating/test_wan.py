"""Video latents, ``[C, T, H, W]``, through embed, rollout and one NFT update: LoRA and full, on one rank and on two."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.storage import media
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.policies import read_part
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.stages.conftest import make, make_iteration, make_on_ranks, make_run

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


@pytest.mark.processes
def test_a_video_model_takes_one_ddrl_update_with_data_on_one_rank_and_on_two(
    wan_path: str, prompt_dir: str, tmp_path: Path
):
    run = make_run(tmp_path, ddrl_recipe(wan_path, prompt_dir, tmp_path / "clips"))
    make_iteration(run, tmp_path)
    alone = requests.update(run, 0)
    both = alone.model_copy(update={"slot": f"{alone.slot}-on-two-ranks"})
    make_on_ranks(both, tmp_path, 2)

    before = read_part(input_of(run.slots.policy(0)), "current")
    a, b = (read_part(input_of(request.slot), "current") for request in (alone, both))
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 2e-4
    assert max(float((a[name] - before[name]).abs().max()) for name in a) > 1e-4
    tables: list[Any] = [read_table(Artifact(input_of(r.slot)), "transitions.parquet") for r in (alone, both)]
    for table in tables:
        assert table["log_ratio"].tolist() == [0.0] * 12
        assert table["logp_drift"].max() < 1e-6
    assert tables[0]["sample_id"].tolist() == tables[1]["sample_id"].tolist()
    losses = [read_table(Artifact(input_of(r.slot)), "metrics.parquet")["data_loss"].iloc[0] for r in (alone, both)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] > 0


def one_iteration(run: Run, tmp_path: Path, ranks: int) -> None:
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    step = (lambda r: make(r, tmp_path)) if ranks == 1 else (lambda r: make_on_ranks(r, tmp_path, ranks))
    step(requests.rollout(run, 0))
    for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, tmp_path)
    step(requests.update(run, 0))


@pytest.mark.processes
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_a_video_model_takes_one_nft_update_on_one_rank_and_on_two(
    lora: dict[str, Any] | None, wan_path: str, prompt_dir: str, tmp_path: Path
):
    alone, both = (make_run(tmp_path / name, recipe(wan_path, prompt_dir, lora), name) for name in ("alone", "both"))
    one_iteration(alone, tmp_path, ranks=1)
    one_iteration(both, tmp_path, ranks=2)

    # Samples are split by sample: every byte is the same on any number of ranks.
    assert input_of(alone.slots.iteration(0, "rollout")).content == input_of(both.slots.iteration(0, "rollout")).content

    policies = [input_of(run.slots.policy(1)) for run in (alone, both)]
    before = read_part(input_of(alone.slots.policy(0)), "current")
    for part in ("current", "old", "ema"):
        a, b = (read_part(policy, part) for policy in policies)
        assert a.keys() == b.keys() == before.keys()
        # Sums over ranks are taken in another order; Adam turns rounding of tiny gradients into up to a whole step.
        assert max(float((a[name] - b[name]).abs().max()) for name in a) < 2e-4
        assert max(float((a[name] - before[name]).abs().max()) for name in a) > 1e-4


@pytest.mark.processes
def test_a_rollout_is_the_same_bytes_on_one_rank_and_on_four(wan_path: str, prompt_dir: str, tmp_path: Path):
    values = recipe(wan_path, prompt_dir, LORA)
    # Six shards: two ranks have one more than the others.
    values["rollout"]["samples_per_shard"] = 1
    run = make_run(tmp_path, values)
    for request in (partial(requests.policy, run), lambda: run.prepared.embed, partial(requests.rollout, run, 0)):
        make(request(), tmp_path)
    alone = requests.rollout(run, 0)
    four = alone.model_copy(update={"slot": f"{alone.slot}-on-four-ranks"})
    assert make_on_ranks(four, tmp_path, 4).content == input_of(alone.slot).content


def test_a_rollout_stores_what_the_reward_saw_and_the_latents_it_came_from(
    wan_path: str, prompt_dir: str, tmp_path: Path
):
    run = make_run(tmp_path, recipe(wan_path, prompt_dir, LORA))
    one_iteration(run, tmp_path, ranks=1)
    artifact = Artifact(input_of(run.slots.iteration(0, "rollout")))
    stored = list(read_samples(artifact))
    assert [s.pixels.shape for s in stored] == [(5, 16, 16, 3)] * 6
    assert {s.extension for s in stored} == {"mkv"}
    assert len({s.row["seed"] for s in stored}) == 6
    assert {s.row["policy"] for s in stored} == {input_of(run.slots.policy(0), "old").content}

    update = Artifact(input_of(run.slots.policy(1)))
    advantages = read_table(update, "advantages.parquet")
    # NFT: rewards minus their group's mean over the deviation of all, plus 1e-4.
    rewards = advantages["reward"].to_numpy().reshape(2, 3)
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std() + 1e-4)
    np.testing.assert_allclose(advantages["advantage"].to_numpy().reshape(2, 3), expected, rtol=1e-12)
    metrics = read_table(update, "metrics.parquet")
    assert metrics["step"].tolist() == [0, 1]
    # Old and reference equal current before the first step moves it.
    old_deviations, distances = metrics["old_deviation"].tolist(), metrics["kl"].tolist()
    assert old_deviations[0] == 0
    assert distances[0] == 0
    assert old_deviations[1] > 0
    names = read_part(input_of(run.slots.policy(0)), "current")
    assert {f"step.{name}" for name in names} <= read_part(input_of(run.slots.policy(1)), "optimizer").keys()
