"""Optimizer steps by a trainer made by hand: steps that are left out, and adapters that drop out."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cosmos_rl_core import plugins, seeds
from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, moved, tensors_of
from cosmos_rl_core.errors import ConfigError, CosmosRLError, DivergenceError
from cosmos_rl_core.models._conditioning import Conditioning, stack
from cosmos_rl_core.parallel import compiling, sharding
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.training.optimizer import optimizer_state
from cosmos_rl_core.weights.lora_layers import dropouts_of, dropping
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import prepare
from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.policies import read_part
from stages.training.trainer import MicroBatch, Trainer, Watcher
from tests.stages.conftest import make, make_run
from tests.stages.ranks import start_ranks

WORDS = {"name": "rendered_text", "alphabet": "AB", "num_test_words": 1, "num_items": 8}
DROPPED = LoraConfig(r=4, lora_alpha=8.0, lora_dropout=0.4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save("sd3", tmp_path_factory.mktemp("trainer") / "sd3"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all runs, which share their text embeddings."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def conditioning(folder: str) -> Conditioning:
    return conditioning_of(folder)


def conditioning_of(folder: str) -> Conditioning:
    return stack(load_model(folder, ("text",), CPU).encode_prompts(["a", "b"], 16), CPU)


def trainer_of(
    folder: str, kind: str, lora: LoraConfig | None, steps: int = 1, group: Group | None = None, **options: Any
) -> Trainer:
    """On weights that have moved already; the behaviour is where they are, the average starts there too."""
    group = group or Group(60.0)
    model = load_model(folder, ("transformer",), CPU)
    weights = prepare(model.transformer, lora, shard=partial(cut_over, group.mesh))
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), 0.1))
    weights.create("behaviour")
    weights.create("ema")
    plugin = plugins.load("algorithms", kind)
    algorithm = plugin.Algorithm(plugin.Options(type=kind, dataset=DatasetOptions(name="none")))
    planned = {"lrs": [1e-3] * steps, "ema_decays": [0.5] * steps, "first_step": 0} | options
    numbers = {"betas": (0.9, 0.99), "epsilon": 1e-8, "weight_decay": 0.01, "grad_norm_clip": 1.0}
    asked = OptimizerSteps.model_validate(planned | numbers)
    planned_update: Any = SimpleNamespace(steps=asked, param_dtype="float32")
    return Trainer(model, algorithm, weights, planned_update, context_of(group))


def context_of(group: Group, notes: list[str] | None = None) -> Any:
    """What a trainer asks of a stage."""
    outcome = SimpleNamespace(note=print if notes is None else notes.append)
    return SimpleNamespace(ranks=group, progress=lambda *_: None, outcome=outcome)


def cut_over(mesh: DeviceMesh | None, transformer: nn.Module) -> Shards:
    return WHOLE if mesh is None else sharding.shard(transformer, mesh, None)


def micro_batch(conditioning: Conditioning, samples: slice, key: str = "") -> MicroBatch:
    """Return a micro-batch of some of two samples, each with a key of its own."""
    x_0, noise = (torch.from_numpy(seeds.normal((2, 4, 8, 8), name))[samples] for name in ("x_0", "noise"))
    t, advantages = (torch.tensor(values, device=CPU)[samples] for values in ([0.4, 0.8], [1.0, -2.0]))
    keys = tuple((key, i) for i in range(2))[samples]
    own = conditioning.each(lambda tensor: tensor[samples])
    return MicroBatch(Batch(x_0, noise, t, advantages), own, keys=keys)


def both(conditioning: Conditioning) -> list[MicroBatch]:
    return [micro_batch(conditioning, slice(None))]


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that a step moves."""
    named = {f"{part}/{n}": t for part in (CURRENT, "ema") for n, t in tensors_of(trainer.weights, part).items()}
    state = optimizer_state(trainer.optimizer, trainer.weights.parameters)
    return named | {name: tensor.clone() for name, tensor in state.items()}


def recipe(lora: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
    diffusers = {"inference_size": [32, 64], "max_prompt_length": 12}
    policy = {"model_name_or_path": "package:tiny-sd3", "diffusers": diffusers, "lora": lora}
    return {"policy": policy, "train": train}


def poison(trainer: Trainer, steps: set[int], value: float = math.inf) -> None:
    """Make a gradient of these steps infinite."""

    class Poisoner(Watcher):
        def saw(self, index: int, micro: MicroBatch, loss: Loss) -> None:
            if index in steps:
                first = next(iter(trainer.weights.parameters.values()))
                first.grad = torch.full_like(first, value, device=CPU)

    trainer.watcher = Poisoner()


# ---- losses of plugins


def test_a_loss_that_is_not_one_number_per_sample_is_refused(folder: str, conditioning: Conditioning):
    trainer: Any = trainer_of(folder, "sft", LoraConfig(r=4))
    own = trainer.algorithm.loss
    trainer.algorithm.loss = lambda velocity, batch: Loss(own(velocity, batch).per_sample.mean(), {})
    with pytest.raises(ConfigError, match=r"one number per sample: found shape \[\], expected \[2\]"):
        trainer.step(0, both(conditioning), 2, 1)


def test_a_metric_is_the_mean_over_the_samples_that_have_it(folder: str, conditioning: Conditioning):
    trainer: Any = trainer_of(folder, "sft", LoraConfig(r=4))
    own, values = trainer.algorithm.loss, iter(([1.0, 3.0], [5.0, 9.0], [70.0, 90.0]))

    def loss(velocity: Any, batch: Any) -> Loss:
        found = own(velocity, batch).per_sample
        measured = torch.tensor(next(values), device=CPU)
        return Loss(found * 0 + measured, {"data_loss" if measured[0] == 5 else "policy_loss": measured})

    trainer.algorithm.loss = loss
    padding = replace(micro_batch(conditioning, slice(None)), weight=0.0)
    trainer.step(0, [*both(conditioning), *both(conditioning), padding], 2, 1)
    (row,) = trainer.rows
    assert (row["policy_loss"], row["data_loss"], row["data_loss_max"]) == (2, 7, 9)
    # What is descended is the sum of both.
    assert (row["loss"], row["loss_max"]) == (9, 9)
    trainer.rows.clear()
    values = iter(([1.0, 3.0], [2.0, 6.0], [5.0, 9.0]))
    # Two noise levels of each sample, of which one has data.
    trainer.step(0, [*both(conditioning)] * 3, 2, 2)
    (row,) = trainer.rows
    assert (row["policy_loss"], row["data_loss"], row["loss"]) == (3, 7, 6.5)


# ---- gradients that are not finite


def test_a_skipped_step_moves_nothing_and_is_a_row_of_metrics(folder: str, conditioning: Conditioning):
    """What follows goes on as if there had been no such step."""
    notes: list[str] = []
    left_out = trainer_of(folder, "sft", LoraConfig(r=4), 4, max_nonfinite=1, lrs=[1e-3, 9.0, 1e-4, 9.0])
    left_out.context = context_of(left_out.group, notes)
    poison(left_out, {1, 3})
    straight = trainer_of(folder, "sft", LoraConfig(r=4), 2, lrs=[1e-3, 1e-4])
    for index in range(4):
        assert left_out.step(index, both(conditioning), 2, 1)
    for index in range(2):
        straight.step(index, both(conditioning), 2, 1)
    found, expected = state_of(left_out), state_of(straight)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    rows = pd.DataFrame(left_out.rows)
    assert rows["step"].tolist() == [0, 1, 2, 3]
    assert rows["lr"].tolist() == [1e-3, 0, 1e-4, 0]
    assert rows["grad_norm"].isna().tolist() == [False, True, False, True]
    assert left_out.summary()["nonfinite_steps"] == 2
    assert straight.summary().keys() == {"loss", "grad_norm"}
    assert [note.split(":")[0] for note in notes] == [
        f"optimizer step {step} is skipped (1 in a row, at most 1 are allowed)" for step in (1, 3)
    ]


@pytest.mark.parametrize(("limit", "ends_at"), [(0, 1), (1, 2), (2, 3)])
def test_too_many_skipped_steps_in_a_row_end_the_training(
    folder: str, conditioning: Conditioning, limit: int, ends_at: int
):
    trainer = trainer_of(folder, "sft", LoraConfig(r=4), 4, max_nonfinite=limit)
    poison(trainer, {1, 2, 3}, math.nan)
    for index in range(ends_at):
        trainer.step(index, both(conditioning), 2, 1)
    before = state_of(trainer)
    with pytest.raises(DivergenceError, match="the gradient norm is nan"):
        trainer.step(ends_at, both(conditioning), 2, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(trainer).items())


class OtherRankDiverges:
    """A group of two whose other rank has gradients that are not finite."""

    rank, world_size, leads, device = 0, 2, True, CPU

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def all_reduce_sum_(self, tensor: Tensor) -> Tensor:
        return tensor.fill_(math.inf) if tensor.dtype == torch.float32 else tensor.mul_(2)


def test_a_rank_with_finite_gradients_skips_the_step_with_the_others(folder: str, conditioning: Conditioning):
    trainer = trainer_of(folder, "sft", LoraConfig(r=4), 1, max_nonfinite=1)
    trainer.group = cast(Group, OtherRankDiverges())
    before = state_of(trainer)
    assert trainer.step(0, both(conditioning), 4, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(trainer).items())
    assert trainer.nonfinite_in_a_row == 1


def leave_one_step_of_three_out(folder: str) -> None:
    """The second, because one rank has NaN in a row of its own: the other has not, and none after it can be told."""
    group = Group(60.0, Parallelism(world_size=2, dp_shard_size=2))
    mine = micro_batch(conditioning_of(folder), slice(group.rank, group.rank + 1))
    left_out = trainer_of(folder, "sft", None, 3, group, max_nonfinite=1, lrs=[1e-3, 9.0, 1e-4])
    straight = trainer_of(folder, "sft", None, 2, group, lrs=[1e-3, 1e-4])
    matrix = next(p for p in left_out.model.transformer.parameters() if isinstance(p, DTensor))

    def poisoned(index: int) -> Iterator[MicroBatch]:
        yield mine
        if index == 1 and group.rank == 1:
            assert isinstance(matrix.grad, DTensor)
            matrix.grad.to_local()[0] = math.nan

    in_a_row: list[int] = []
    for index in range(3):
        left_out.step(index, poisoned(index), 2, 1)
        in_a_row.append(left_out.nonfinite_in_a_row)
    for index in range(2):
        straight.step(index, [mine], 2, 1)
    assert group.gather(in_a_row) == [[0, 1, 0]] * 2
    assert [row["lr"] for row in left_out.rows] == [1e-3, 0, 1e-4]
    found, expected = state_of(left_out), state_of(straight)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    group.close()


@pytest.mark.processes
def test_ranks_skip_a_step_together_for_rows_that_only_one_rank_has(folder: str, tmp_path: Path):
    start_ranks(partial(leave_one_step_of_three_out, folder), tmp_path, 2, 60.0)


@pytest.mark.slow
def test_skipped_steps_count_across_iterations_and_their_limit_may_be_raised(store: Path):
    """A learning rate without measure: the first step leaves weights that have no finite gradient any more."""

    def run(limit: int) -> Any:
        train = {
            "num_iterations": 4,
            "train_batch_per_replica": 2,
            "optm_lr": 1e30,
            "max_nonfinite_steps": limit,
            "train_policy": {
                "type": "sft",
                "steps_per_iteration": 1,
                "dataset": WORDS,
            },
        }
        return make_run(store, recipe({"r": 2, "target_modules": ["to_q"]}, train), "diverges")

    for request in (requests.policy(run(1)), run(1).prepared.embed, run(1).prepared.encode):
        make(request, store)
    manifests = [make(requests.finetune(run(1), k), store) for k in range(2)]
    assert ["nonfinite_steps" in manifest.summary for manifest in manifests] == [False, True]
    with pytest.raises(DivergenceError):
        make(requests.finetune(run(1), 2), store)
    manifest = make(requests.finetune(run(2), 2), store)
    assert manifest.summary["nonfinite_steps"] == 1
    clocks = Artifact(input_of(run(2).slots.policy(3))).json("schedule/clocks.json")
    assert clocks == {"iteration": 3, "optimizer_step": 3, "nonfinite_steps": 2}
    first, last = (read_part(input_of(run(2).slots.policy(k)), CURRENT) for k in (1, 3))
    assert all(torch.equal(last[name], first[name]) for name in first)
    with pytest.raises(DivergenceError):
        make(requests.finetune(run(2), 3), store)


# ---- dropout


def gradients(trainer: Trainer, micro_batches: list[MicroBatch]) -> dict[str, Tensor]:
    """Return the gradients of one optimizer step without clipping, as Adam averages them."""
    trainer.steps = trainer.steps.model_copy(update={"grad_norm_clip": 1e9})
    trainer.step(0, micro_batches, 2, 1)
    return optimizer_state(trainer.optimizer, trainer.weights.parameters)


@pytest.mark.parametrize("kind", ["sft", "nft"])
def test_gradients_under_dropout_depend_on_the_keys_of_samples_and_not_on_their_batch(
    folder: str, conditioning: Conditioning, kind: str
):
    def of(*micro_batches: MicroBatch, checkpointing: bool = False, lora: LoraConfig = DROPPED) -> dict[str, Tensor]:
        trainer = trainer_of(folder, kind, lora)
        if checkpointing:
            cast(Any, trainer.model.transformer).enable_gradient_checkpointing()
        return gradients(trainer, list(micro_batches))

    def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return all(torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-7) for name in a)

    (whole,) = both(conditioning)
    found = of(whole)
    assert all(torch.equal(tensor, found[name]) for name, tensor in of(whole).items())
    assert equal(of(*(micro_batch(conditioning, slice(i, i + 1)) for i in range(2))), found)
    assert equal(of(whole, checkpointing=True), found)
    assert not equal(of(micro_batch(conditioning, slice(None), "another pass")), found)
    assert not equal(of(whole, lora=DROPPED.model_copy(update={"lora_dropout": 0.0})), found)


def test_only_the_trained_policys_forward_pass_drops_out(folder: str, conditioning: Conditioning):
    """NFT's behaviour, here of equal weights, is compared with as it is; afterwards nothing drops out."""
    trainer, (micro,) = trainer_of(folder, "nft", DROPPED), both(conditioning)
    batch = cast(Batch, micro.batch)
    with torch.no_grad():
        plain = trainer.model.velocity(batch.x_t, batch.t, conditioning)
        with dropping(dropouts_of(trainer.model.transformer), micro.keys):
            dropped = trainer.model.velocity(batch.x_t, batch.t, conditioning)
        assert torch.equal(trainer.model.velocity(batch.x_t, batch.t, conditioning), plain)
    trainer.step(0, [micro], 2, 1)
    assert trainer.rows[0]["old_deviation"] == pytest.approx(float((dropped - plain).square().mean()), rel=1e-4)
    assert trainer.rows[0]["old_deviation"] > 1e-4


@pytest.mark.slow
def test_compiled_blocks_drop_out_the_same_and_are_compiled_once_for_all_keys(folder: str, conditioning: Conditioning):
    plain, compiled = (trainer_of(folder, "sft", DROPPED, 12) for _ in range(2))
    # Captured as for any compiler, and run without one: that would take minutes.
    compiling.compile_blocks(compiled.model.transformer, "aot_eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for index in range(12):
            micro = micro_batch(conditioning, slice(None), f"step {index}")
            for trainer in (plain, compiled):
                trainer.step(index, [micro], 2, 1)
    torch._dynamo.reset()
    found, expected = state_of(compiled), state_of(plain)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)


def test_supervised_training_repeats_the_same_dropout(store: Path):
    def trained(name: str, lora_dropout: float) -> str:
        lora = {"r": 2, "init_lora_weights": True, "lora_dropout": lora_dropout}
        train = {"num_iterations": 1, "optm_name": "Adam", "optm_lr": 1e-3, "train_batch_per_replica": 4}
        sft = {"type": "sft", "steps_per_iteration": 2, "mini_batch": 2, "dataset": WORDS}
        run = make_run(store, recipe(lora, train | {"train_policy": sft}), name)
        for request in (requests.policy(run), run.prepared.embed, run.prepared.encode):
            make(request, store)
        return make(requests.finetune(run, 0), store).content

    first = trained("first", 0.5)
    assert trained("again", 0.5) == first
    assert trained("without", 0.0) != first


# ---- ranks that hold the same tensors


def end_with_one_bit_of_the_second_rank_changed(folder: str) -> None:
    group = Group(60.0, Parallelism(world_size=2))
    trainer = trainer_of(folder, "sft", LoraConfig(r=4), group=group)
    trainer.step(0, both(conditioning_of(folder)), 4, 1)
    name = sorted(trainer.weights.parameters)[3]
    if group.rank == 1:
        trainer.weights.here("ema")[name].view(torch.int32).reshape(-1)[5] ^= 1
    with pytest.raises(CosmosRLError, match=rf"different bits of 1 of \d+ tensors, e\.g\. ema/{re.escape(name)};"):
        trainer.write(["ema"], 0)
    group.close()


@pytest.mark.processes
def test_ranks_that_end_with_another_bit_fail_with_the_name_of_the_tensor(folder: str, tmp_path: Path):
    start_ranks(partial(end_with_one_bit_of_the_second_rank_changed, folder), tmp_path, 2, 120.0)
