"""Ranks that share the tokens of each video make the samples and, rounding aside, the policies of one process."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from cosmos_rl_core.models.wan.model import Wan
from cosmos_rl_core.parallel import compiling
from cosmos_rl_core.storage import store
from flows.planning import requests
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.ranks import RanksFailed
from tests.stages.small_video import LORA, ddrl_recipe, recipe
from tests.stages.training.test_given_rollouts import values as given_frames_recipe
from tests.stages.training.test_sharded_training import PARTS, aside, begun, require_close, sampled

pytestmark = pytest.mark.processes

PEERS: dict[str, Any] = {"cp_size": 2}
SHARDED_PEERS: dict[str, Any] = {"dp_shard_size": 2, **PEERS}


def longer(values: dict[str, Any]) -> dict[str, Any]:
    """Videos of 3 latent frames of 1 x 3 tokens, which two peers share as 5 and 4."""
    values["policy"]["diffusers"] |= {"inference_size": [16, 48], "train_frames": 9}
    return values


def latents_of(request: Request) -> dict[str, torch.Tensor]:
    artifact = Artifact(input_of(request.slot))
    stored = list(read_samples(artifact, contracts.TENSORS))
    return {sample.sample_id: torch.from_numpy(sample.final_latents) for sample in stored}


def require_same_samples(alone: Request, shared: Request) -> None:
    mine, others = latents_of(alone), latents_of(shared)
    assert mine.keys() == others.keys()
    for name, latents in mine.items():
        torch.testing.assert_close(others[name], latents, rtol=1e-4, atol=1e-5)


def require_same_metrics(alone: Request, shared: Request) -> None:
    mine, others = (read_table(Artifact(input_of(request.slot)), METRICS) for request in (alone, shared))
    pd.testing.assert_frame_equal(mine, others, rtol=1e-4, atol=1e-6)


def die_in_the_second_shard() -> None:
    finish = Attempt.finish

    def finish_or_die(self: Attempt, index: int, *others: Any, **named: Any) -> None:
        if index == 1:
            # The other peer writes the first one, maybe a little later.
            while store.read_if_exists(self._marker(0)) is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self, index, *others, **named)

    setattr(Attempt, "finish", finish_or_die)  # noqa: B010


def note_decoded(folder: Path) -> None:
    """Note in a file for each peer how many videos it decodes."""
    decode = Wan.decode

    def noted(self: Wan, latents: torch.Tensor) -> torch.Tensor:
        with (folder / os.environ["RANK"]).open("a") as file:
            file.write("x" * len(latents))
        return decode(self, latents)

    setattr(Wan, "decode", noted)  # noqa: B010


def test_peers_decode_and_write_different_videos(wan_path: str, prompt_dir: str, tmp_path: Path):
    """Six videos are three units of two, which the first, the second and the first peer write."""
    shared = aside(requests.rollout(begun(tmp_path, longer(recipe(wan_path, prompt_dir, LORA))), 0), "shared")
    (tmp_path / "decoded").mkdir()
    make_on_ranks(shared, tmp_path, 2, **PEERS, before=partial(note_decoded, tmp_path / "decoded"))
    assert {path.name: len(path.read_text()) for path in (tmp_path / "decoded").iterdir()} == {"0": 4, "1": 2}


def test_two_peers_make_what_one_process_makes_and_go_on_after_a_kill(wan_path: str, prompt_dir: str, tmp_path: Path):
    run = begun(tmp_path, longer(recipe(wan_path, prompt_dir, LORA)))
    shared = aside(requests.rollout(run, 0), "shared")
    with pytest.raises(RanksFailed):
        make_on_ranks(shared, tmp_path, 2, **PEERS, before=die_in_the_second_shard)
    # The first shard is adopted by one peer for both.
    manifest = make_on_ranks(shared, tmp_path, 2, **PEERS)
    assert len({entry.path.split("/")[1] for name, entry in manifest.files.items() if name.startswith("tensors/")}) == 2
    assert manifest.numerics["cp_size"] == 2
    require_same_samples(requests.rollout(run, 0), shared)

    update, both = requests.update(run, 0), aside(requests.update(run, 0), "both", gradient_checkpointing=True)
    make(update, tmp_path)
    make_on_ranks(both, tmp_path, 2, **PEERS)
    require_close(update, both, PARTS)
    require_same_metrics(update, both)


def compile_for_no_device() -> None:
    """Capture blocks as for any compiler, and run them without one: that would take minutes."""
    setattr(compiling, "compile_blocks", partial(compiling.compile_blocks, backend="aot_eager"))  # noqa: B010


@pytest.mark.slow
def test_compiled_blocks_with_shared_weights_train_as_in_one_process(wan_path: str, prompt_dir: str, tmp_path: Path):
    # Micro-batches of two samples and of one: what is compiled for one size meets another.
    run = begun(tmp_path, longer(recipe(wan_path, prompt_dir, LORA)))
    update, compiled = requests.update(run, 0), aside(requests.update(run, 0), "compiled", gradient_checkpointing=True)
    make(update, tmp_path)
    make_on_ranks(compiled, tmp_path, 4, **SHARDED_PEERS, compile=True, timeout_s=500, before=compile_for_no_device)
    require_close(update, compiled, PARTS)


def policy_gradient_recipe(wan_path: str, prompt_dir: str, folder: Path) -> dict[str, Any]:
    """DDRL, whose data term is on random pixels."""
    values = longer(ddrl_recipe(wan_path, prompt_dir, folder))
    shape = {"size": [16, 48], "frames": 9}
    values["train"]["train_policy"]["data"] = {"name": "mock", "num_items": 2, "num_prompts": 2, **shape}
    return values


@pytest.mark.slow
def test_two_pairs_of_peers_share_weights_too_and_count_every_transition_once(
    wan_path: str, prompt_dir: str, tmp_path: Path
):
    values = policy_gradient_recipe(wan_path, prompt_dir, tmp_path / "clips")
    # Shards of 4 and 2 samples: one pair has more to do.
    values["rollout"]["samples_per_shard"] = 4
    run, record = make_run(tmp_path, values), str(tmp_path / "numerics")
    make(requests.policy(run), tmp_path, numerics_record=f"{record}/policy.json")
    for request in (run.prepared.embed, run.prepared.encode):
        make(request, tmp_path)
    sampled(run, 0, tmp_path)
    shared = aside(requests.rollout(run, 0), "shared")
    # As in a run: what ranks share differs from what policy 0 was made with, which may be.
    make_on_ranks(shared, tmp_path, 4, **SHARDED_PEERS, numerics_record=f"{record}/rollout.json")
    require_same_samples(requests.rollout(run, 0), shared)

    update, together = requests.update(run, 0), aside(requests.update(run, 0), "together")
    make(update, tmp_path)
    make_on_ranks(together, tmp_path, 4, **SHARDED_PEERS)
    require_close(update, together, {part: PARTS[part] for part in ("current", "ema", "optimizer")})
    require_same_metrics(update, together)
    mine, others = (
        read_table(Artifact(input_of(request.slot)), contracts.Update.TRANSITIONS) for request in (update, together)
    )
    assert len(mine) == 12
    for column in ("optimizer_step", "sample_id", "step"):
        assert mine[column].tolist() == others[column].tolist()
    assert others["log_ratio"].tolist() == [0.0] * 12


def supervised(tmp_path: Path, wan_path: str) -> Run:
    """A run of full fine-tuning on frames of random pixels, judged by five others in three batches."""
    values = recipe(wan_path, "", None)
    values["policy"]["diffusers"] |= {"inference_size": [32, 64], "train_frames": 1}
    dataset = {"name": "mock", "num_items": 5, "num_prompts": 2, "size": [32, 64]}
    values["train"] = {
        "num_iterations": 1,
        "train_batch_per_replica": 5,
        "optm_lr": 1e-3,
        "train_policy": {"type": "sft", "steps_per_iteration": 2, "mini_batch": 2, "dataset": dataset},
    }
    values["validation"] = {
        "batch_size": 2,
        "dataset": {"name": "rendered_text", "split": "test", "num_items": 5},
        "data": {"name": "rendered_text", "split": "test", "num_items": 5},
    }
    del values["rollout"], values["rewards"], values["policy"]["diffusers"]["sample"]
    return make_run(tmp_path, values)


@pytest.mark.slow
def test_supervised_steps_and_held_out_losses_equal_one_process(wan_path: str, tmp_path: Path):
    run = supervised(tmp_path, wan_path)
    for ask in (
        partial(requests.policy, run),
        lambda: run.prepared.embed,
        lambda: run.prepared.encode,
        lambda: run.prepared.held_out.embeds[0],
        lambda: run.prepared.held_out.encodes[0],
        partial(requests.validate, run, 0),
    ):
        make(ask(), tmp_path)
    finetune, together = requests.finetune(run, 0), aside(requests.finetune(run, 0), "together")
    make(finetune, tmp_path)
    make_on_ranks(together, tmp_path, 4, **SHARDED_PEERS)
    require_close(finetune, together, {"current": PARTS["current"], "optimizer": PARTS["optimizer"]})
    require_same_metrics(finetune, together)

    validate, sharing = requests.validate(run, 0), aside(requests.validate(run, 0), "sharing")
    make_on_ranks(sharing, tmp_path, 4, **SHARDED_PEERS)
    mine, others = (
        read_table(Artifact(input_of(request.slot)), contracts.Validate.LOSSES) for request in (validate, sharing)
    )
    pd.testing.assert_frame_equal(mine, others, rtol=1e-5)


@pytest.mark.slow
def test_two_pairs_of_peers_share_videos_that_begin_with_given_frames(tmp_path: Path):
    """Cosmos's, 2, 1 and 0 of whose 3 latent frames are given; texts come after the projection that is passed over."""
    run = make_run(tmp_path, given_frames_recipe(tmp_path / "inputs"))
    for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
        make(request, tmp_path)
    sampled(run, 0, tmp_path)
    shared, update = aside(requests.rollout(run, 0), "shared"), requests.update(run, 0)
    make_on_ranks(shared, tmp_path, 4, **SHARDED_PEERS)
    require_same_samples(requests.rollout(run, 0), shared)

    together = aside(update, "together")
    make(update, tmp_path)
    make_on_ranks(together, tmp_path, 4, **SHARDED_PEERS)
    require_close(update, together, {part: PARTS[part] for part in ("current", "optimizer")})
    require_same_metrics(update, together)
