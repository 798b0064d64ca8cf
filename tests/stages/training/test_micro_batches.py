"""Micro-batches that are made while earlier ones compute: order, devices, and what happens when one cannot be made."""

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_rl_core.algorithms._base import Batch, Transitions
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.sampling.transition import Coefficients
from flows.planning import requests
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.training.micro_batches import made_ahead, my_share
from stages.training.trainer import Make, MicroBatch
from tests.stages.conftest import make, make_run

CPU = torch.device("cpu")
META = torch.device("meta")


def one(number: int, weight: float = 1.0) -> MicroBatch:
    """A micro-batch that is known by its noise level."""
    x = torch.zeros((1, 2), device=CPU)
    return MicroBatch(Batch(x, x, torch.tensor([float(number)], device=CPU), None), Conditioning({"embeds": x}), weight)


def number_of(micro: MicroBatch) -> tuple[int, float]:
    return int(micro.batch.t), micro.weight


@pytest.mark.parametrize("rank", [0, 1])
def test_steps_have_their_micro_batches_and_short_ranks_repeat_one_with_weight_0(rank: int):
    group: Any = SimpleNamespace(data_rank=rank, data_world_size=2)
    steps = [[[partial(one, 0)], [partial(one, 1)], [partial(one, 2)]], [[partial(one, 3)], [partial(one, 4)]]]
    with made_ahead((my_share(step, group) for step in steps), CPU) as made:
        found = [[number_of(micro) for micro in step] for step in made]
    expected = [[(0, 1.0), (2, 1.0)], [(3, 1.0)]] if rank == 0 else [[(1, 1.0), (2, 0.0)], [(4, 1.0)]]
    assert found == expected


def test_the_next_step_is_made_while_this_one_computes():
    begun = threading.Event()

    def second() -> MicroBatch:
        begun.set()
        return one(1)

    with made_ahead(iter([[partial(one, 0)], [second]]), CPU) as steps:
        for step in steps:
            for micro in step:
                assert begun.wait(60)
                assert number_of(micro)[0] in (0, 1)


def test_steps_before_a_micro_batch_that_cannot_be_made_are_done():
    def broken() -> MicroBatch:
        raise ArtifactError("i7 is not what was committed")

    shares: list[list[Make]] = [[partial(one, 0)], [partial(one, 1), broken], [broken]]
    with made_ahead(shares, CPU) as steps:
        assert [number_of(micro)[0] for micro in next(steps)] == [0]
        second = next(steps)
        assert number_of(next(second))[0] == 1
        with pytest.raises(ArtifactError, match=r"^i7 is not what was committed$"):
            next(second)


def test_no_thread_outlives_a_training_that_ends_early():
    threads = threading.active_count()
    with made_ahead(([partial(one, number)] for number in range(100)), CPU) as steps:
        assert [number_of(micro)[0] for micro in next(steps)] == [0]
    assert threading.active_count() == threads


def test_every_tensor_of_a_micro_batch_is_pinned_once_before_it_is_copied():
    """As it is pinned: a tensor that stays out would have the host wait for its copy."""
    x = torch.zeros((1, 2), device=CPU)
    at = Coefficients(*[x] * len(Coefficients._fields))
    transitions = Transitions(x, x, x, at, x, x, mask=x)
    texts = Conditioning({"embeds": x})
    micro = MicroBatch(transitions, texts, negative=texts)
    seen: list[torch.Tensor] = []

    def add_1(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor + 1

    changed = tensors_in(micro.each(add_1))
    assert len(seen) == len(changed) == len(tensors_in(micro))
    assert all(tensor.tolist() == [[1, 1]] for tensor in changed)
    assert x.tolist() == [[0, 0]]


def test_every_tensor_of_a_micro_batch_moves_to_the_device():
    x = torch.zeros((1, 2), device=CPU)
    at = Coefficients(*[x] * len(Coefficients._fields))
    transitions = Transitions(x, x, x, at, x, x, mask=x)
    for micro in (
        one(0),
        MicroBatch(
            transitions, Conditioning({"embeds": x}), negative=Conditioning({"embeds": x}), names=("a",), steps=(1,)
        ),
    ):
        moved = micro.to(META)
        assert {tensor.device for tensor in tensors_in(moved)} == {META}
        assert len(tensors_in(moved)) == len(tensors_in(micro))
        assert (moved.weight, moved.names, moved.steps) == (micro.weight, micro.names, micro.steps)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, MicroBatch | Batch | Transitions):
        value = list(vars(value).values())
    if isinstance(value, dict | Conditioning):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


# ---- through the stage


def trained(tmp_path: Path) -> Run:
    """Two steps of supervised training on four words, planned, with all it needs."""
    diffusers = {"inference_size": [32, 64], "max_prompt_length": 12}
    dataset = {"name": "rendered_text", "num_items": 4}
    sft = {"type": "sft", "mini_batch": 1, "steps_per_iteration": 2, "dataset": dataset}
    policy = {"model_name_or_path": "package:tiny-sd3", "diffusers": diffusers, "lora": {"r": 2}}
    train = {"num_iterations": 1, "train_batch_per_replica": 2, "optm_lr": 1e-3, "train_policy": sft}
    run = make_run(tmp_path, {"policy": policy, "train": train})
    for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
        make(request, tmp_path)
    return run


def test_damaged_latents_end_the_stage_and_its_threads(tmp_path: Path):
    run = trained(tmp_path)
    data = Artifact(input_of(run.prepared.encode.slot))
    (shard,) = (entry for name, entry in data.manifest.files.items() if name.startswith("latents/"))
    path = Path(data.url, shard.path)
    path.write_bytes(path.read_bytes()[:-1] + b"1")
    threads = threading.active_count()
    with pytest.raises(ArtifactError, match=f"{shard.path} is not what was committed: sha256"):
        make(requests.finetune(run, 0), tmp_path)
    assert threading.active_count() == threads
