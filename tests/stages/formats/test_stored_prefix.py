"""Embeddings stored behind the transformer's frozen projection lead to the same samples and policies as those before.

Bit for bit, because every forward pass is of one sample here, as it is when the projection's output is stored.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.slots import input_of
from stages.formats.embeddings import EMPTY, NEGATIVE, Embeddings
from stages.formats.policies import read_part
from tests.hand_made import rewards
from tests.stages.conftest import make, make_on_ranks, make_run
from tests.stages.training.test_given_rollouts import values as given_values
from tests.stages.training.test_sharded_training import aside, require_close

SHAPES = {False: {"prompt_embeds": (200, 32)}, True: {"projected_prompt_embeds": (200, 16)}}
"""Tensors of a prompt's embedding, by whether it has been through the projection."""


def with_and_without(tmp_path: Path, values: dict[str, Any]) -> tuple[Run, Run]:
    """The run as it is planned, and the same as it was planned before there was a choice."""
    run = make_run(tmp_path, values)
    plan = run.plan.model_copy(update={"run_id": "raw", "prefixed": False})
    return run, Run(plan, run.store_url)


def check_embeddings(run: Run, *, prefixed: bool) -> None:
    names = [*(prompt.id for prompt in run.plan.embedded_prompts), NEGATIVE, EMPTY]
    stored = Embeddings([input_of(run.prepared.embed.slot)], names)
    for name in names:
        assert {key: tuple(tensor.shape) for key, tensor in stored[name].items()} == SHAPES[prefixed]


def assert_same_policy(runs: tuple[Run, Run]) -> None:
    after, other = (read_part(input_of(run.slots.policy(1)), "current") for run in runs)
    before = read_part(input_of(runs[0].slots.policy(0)), "current")
    assert all(torch.equal(after[name], other[name]) for name in after)
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-4


@pytest.mark.processes
def test_a_stored_prefix_changes_neither_rollouts_nor_an_update_with_a_loss_on_data(tmp_path: Path):
    values = given_values(tmp_path / "inputs", mini_batch=1, text_dropout=0.5)
    values["rollout"]["n_generation_mini_batch"] = 1
    values["train"]["train_batch_per_replica"] = 2
    runs = with_and_without(tmp_path, values)
    assert [run.plan.prefixed for run in runs] == [True, False]
    make(runs[0].prepared.encode, tmp_path)
    for run in runs:
        for request in (requests.policy(run), run.prepared.embed):
            make(request, tmp_path)
        make(requests.rollout(run, 0), tmp_path)
        for reward in rewards(run, run.slots.iteration(0, "rollout"), 0):
            make(reward, tmp_path)
        make(requests.update(run, 0), tmp_path)
        check_embeddings(run, prefixed=run.plan.prefixed)
    one, other = (input_of(run.slots.iteration(0, "rollout")) for run in runs)
    assert one.content == other.content
    assert_same_policy(runs)

    # Also by two ranks that share the weights, the projection's among them.
    shared = aside(requests.update(runs[0], 0), "shared")
    make_on_ranks(shared, tmp_path, 2, dp_shard_size=2)
    require_close(requests.update(runs[0], 0), shared, {"current": 2e-4})


def test_a_stored_prefix_changes_neither_supervised_steps_nor_the_held_out_loss(tmp_path: Path):
    values = given_values(tmp_path / "inputs")
    data = {"name": "mock", "num_items": 4, "num_prompts": 2, "size": [16, 16], "frames": 9}
    values["train"]["train_policy"] = {"type": "sft", "mini_batch": 1, "steps_per_iteration": 2, "dataset": data}
    values["train"]["train_batch_per_replica"] = 2
    held_out = {"name": "local", "local_dir": str(tmp_path / "inputs/clips"), "size": [16, 16], "frames": 9}
    values["validation"] = {"dataset": {"name": "rendered_text"}, "data": held_out, "batch_size": 1}
    del values["rewards"], values["rollout"], values["policy"]["diffusers"]["sample"]
    runs = with_and_without(tmp_path, values)
    make(runs[0].prepared.held_out.encodes[0], tmp_path)
    losses: list[Any] = []
    for run in runs:
        for request in (requests.policy(run), run.prepared.embed, run.prepared.encode, run.prepared.held_out.embeds[0]):
            make(request, tmp_path)
        make(requests.finetune(run, 0), tmp_path)
        losses.append(make(requests.validate(run, 1), tmp_path).summary["loss"])
        check_embeddings(run, prefixed=run.plan.prefixed)
    assert losses[0] == losses[1]
    assert_same_policy(runs)


def test_full_training_stores_embeddings_before_the_projection_and_trains_it(tmp_path: Path):
    values = given_values(tmp_path / "inputs")
    del values["policy"]["lora"]
    data = {"name": "mock", "num_items": 2, "num_prompts": 2, "size": [16, 16], "frames": 9}
    values["train"]["train_policy"] = {"type": "sft", "mini_batch": 2, "steps_per_iteration": 1, "dataset": data}
    values["train"]["train_batch_per_replica"] = 2
    del values["rewards"], values["rollout"], values["policy"]["diffusers"]["sample"]
    run = make_run(tmp_path, values)
    for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
        make(request, tmp_path)
    make(requests.finetune(run, 0), tmp_path)
    check_embeddings(run, prefixed=False)
    before, after = (read_part(input_of(slot), "current") for slot in (run.slots.policy(0), run.slots.policy(1)))
    for name in ("crossattn_proj.0.weight", "crossattn_proj.0.bias"):
        assert (after[name] - before[name]).abs().max() > 1e-4
