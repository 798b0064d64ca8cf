"""What an optimizer step waits for: the numbers that it reads from another device, counted."""

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._base import Transitions
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.sampling.flow import flow_sde
from cosmos_rl_core.sampling.rollout import table_of
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.weights.policy_weights import prepare
from stages.formats.samples import key_of
from stages.training.drift import DriftWatch
from stages.training.readings import Readings
from stages.training.trainer import MicroBatch, Trainer
from tests.other_device import DEVICE, Elsewhere, OtherDevice
from tests.stages.training.test_trainer import both, conditioning_of, micro_batch, trainer_of

_aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Counts the operations for which a host waits: single numbers, and copies from the other device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        reads = any(isinstance(leaf, Elsewhere) for leaf in tree_flatten((args, kwargs))[0])
        stays = any(isinstance(leaf, Elsewhere) for leaf in tree_flatten(found)[0])
        if reads and not stays:
            self.found.append(str(func))
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save("sd3", tmp_path_factory.mktemp("waits") / "sd3"))


def trainer_there(folder: str, kind: str) -> Trainer:
    """A trainer on the other device, whose behaviour is the base."""
    plain = trainer_of(folder, kind, None)
    model = load_model(folder, ("transformer",), DEVICE)
    weights = prepare(model.transformer, LoraConfig(r=4))
    weights.create("behaviour")
    weights.create("ema")
    weights.create("reference")
    group: Any = SimpleNamespace(
        rank=0, world_size=1, leads=True, device=DEVICE, gather=lambda value: [value], all_reduce_sum_=lambda t: t
    )
    context: Any = SimpleNamespace(ranks=group, progress=lambda *_: None, outcome=plain.context.outcome)
    config: Any = SimpleNamespace(steps=plain.steps, param_dtype="float32")
    return Trainer(model, plain.algorithm, weights, config, context)


@pytest.mark.parametrize(("kind", "num_batches"), [("sft", 3), ("nft", 1)])
def test_a_step_waits_for_the_device_once_with_any_number_of_micro_batches(folder: str, kind: str, num_batches: int):
    made: list[MicroBatch] = both(conditioning_of(folder)) * num_batches
    with OtherDevice():
        trainer = trainer_there(folder, kind)
        with Waits() as waits:
            trainer.step(0, made, 2 * num_batches, 1)
    assert waits.found == ["aten._to_copy.default"]
    (row,) = trainer.rows
    assert row["lr"] == 1e-3
    assert all(math.isfinite(number) for number in row.values())


def recorded(conditioning: Conditioning, *steps: int) -> MicroBatch:
    """Two samples at recorded steps of an SDE, one step each."""
    x, x_next, history = (torch.from_numpy(seeds.normal((2, 4, 8, 8), name)) for name in ("x", "x_next", "history"))
    at = table_of(flow_sde(Schedule((1.0, 0.8, 0.5, 0.0)), 0.7), CPU).at(torch.tensor(steps, device=CPU))
    log_prob = torch.zeros(2, dtype=torch.float64, device=CPU)
    batch = Transitions(x, x_next, history, at, log_prob, torch.tensor([1.0, -2.0], device=CPU))
    names = tuple(key_of(0, name) for name in "ab")
    return MicroBatch(batch, conditioning, negative=conditioning, guidance_scale=2.0, names=names, steps=steps)


@pytest.mark.parametrize("kind", ["grpo", "ddrl"])
def test_a_policy_gradient_step_with_drift_and_data_term_also_waits_once(folder: str, kind: str):
    conditioning = conditioning_of(folder)
    media = micro_batch(conditioning, slice(None))
    made = [recorded(conditioning, 0, 1), recorded(conditioning, 1, 0)]
    made += [replace(media, batch=replace(media.batch, advantages=None))] * (kind == "ddrl")
    with OtherDevice():
        trainer = trainer_there(folder, kind)
        trainer.watcher = watch = DriftWatch(math.inf, trainer, ["rollout"])
        with Waits() as waits:
            trainer.step(0, made, 2, 2)
    assert waits.found == ["aten._to_copy.default"]
    (row,) = trainer.rows
    assert row["lr"] == 1e-3
    assert {"grpo": "kl", "ddrl": "data_loss"}[kind] in row
    assert all(math.isfinite(number) for number in row.values())
    assert [(each["sample_id"], each["step"]) for each in watch.rows] == [("a", 0), ("b", 1), ("a", 1), ("b", 0)]


@pytest.mark.parametrize("kind", ["grpo", "nft"])
def test_a_micro_batch_is_freed_before_the_step_ends(folder: str, kind: str):
    """A step may have thousands of them, whose numbers are all read at its end."""
    conditioning, alive = conditioning_of(folder), list[list[bool]]()
    trainer = trainer_of(folder, kind, LoraConfig(r=4))
    if kind == "grpo":
        trainer.watcher = DriftWatch(math.inf, trainer, ["rollout"])

    def made() -> Iterator[MicroBatch]:
        there: list[ReferenceType[Tensor]] = []
        for _ in range(4):
            micro = recorded(conditioning, 0, 1) if kind == "grpo" else micro_batch(conditioning, slice(None))
            there.append(ref(micro.batch.x if isinstance(micro.batch, Transitions) else micro.batch.x_0))
            yield micro
            del micro
            alive.append([one() is not None for one in there])

    trainer.step(0, made(), 8, 1)
    # The step's own variables still have the latest one.
    assert alive == [[*[False] * earlier, True] for earlier in range(4)]


def test_every_way_to_read_numbers_of_a_device_counts_as_a_wait():
    """The count itself: each way to read is seen."""
    with OtherDevice():
        there = torch.ones(3, device=DEVICE)
        with Waits() as waits:
            _ = there.sum() + there.max()
        assert waits.found == []
        for read in (
            lambda: float(there.sum()),
            lambda: there[0].item(),
            lambda: bool(there.sum() > 2),
            there.tolist,
            there.cpu,
        ):
            with Waits() as waits:
                read()
            assert len(waits.found) == 1


def test_readings_are_handed_out_in_order_with_every_digit():
    found: list[Any] = []
    tensors: list[Tensor] = [
        torch.tensor([0.1, math.inf], device=CPU),
        torch.tensor(1 / 3, dtype=torch.float64, device=CPU),
        torch.zeros(0, device=CPU),
    ]
    readings = Readings()
    for tensor in tensors:
        readings.want(tensor, found.append)
    readings.read()
    assert found == [tensors[0].tolist(), [1 / 3], []]
    readings.read()
    assert len(found) == 3
