"""Optimizer steps on a diffusion model, for any algorithm. Shared by `update` and `finetune`."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_rl_core.algorithms._base import Algorithm, Batch, Loss, Transitions
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.training.optimizer import loss_share
from cosmos_rl_core.weights.lora_layers import DropoutKey, dropouts_of, dropping
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, REFERENCE
from cosmos_rl_core.weights.policy_weights import PolicyWeights
from stages.artifacts.request import Request
from stages.contracts import Finetune, Update
from stages.execution.context import Context
from stages.formats.policies import read_part
from stages.training.loading import load_policy
from stages.training.readings import Readings
from stages.training.stepper import Stepper

PEAKS = ("loss", "policy_loss", "kl", "data_loss", "old_deviation")
"""Metrics whose maximum over samples is recorded next to their mean. The maximum is NaN if any value is NaN."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass. Weight 0 pads a rank that has fewer, so that all do the same number."""

    batch: Batch | Transitions
    conditioning: Conditioning
    weight: float = 1.0
    levels: int = 1
    """Number of consecutive rows of the batch that share a row of the conditioning: noise levels of one sample."""
    negative: Conditioning | None = None
    """Conditioning of the negative prompt; None without guidance."""
    guidance_scale: float = 1.0
    embedded_guidance_scale: float | None = None
    """Guidance that the transformer takes as an input; None for the one that the model was loaded with."""
    names: tuple[str, ...] = ()
    """The samples' keys, for the watcher; empty if it does not need them."""
    steps: tuple[int, ...] = ()
    """The recorded step of each sample."""
    behaviour: str = BEHAVIOUR
    """Name of the weights that made the samples' rollout."""
    keys: tuple[DropoutKey, ...] = ()
    """Keys of each sample's dropout; empty if nothing may be dropped."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch on a device. The host does not wait for a copy from pinned memory to a GPU."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        """Return the micro-batch with ``change`` applied to every tensor."""
        negative = None if self.negative is None else self.negative.each(change)
        return replace(
            self, batch=self.batch.each(change), conditioning=self.conditioning.each(change), negative=negative
        )


def repeated(tensor: Tensor, times: int) -> Tensor:
    """Repeat each row ``times`` times: ``[B, ...] -> [B times, ...]``. For 1 return the tensor itself."""
    return tensor if times == 1 else tensor.unsqueeze(1).expand(-1, times, *tensor.shape[1:]).flatten(0, 1)


def _rows(conditioning: Conditioning, times: int) -> Conditioning:
    return conditioning.each(lambda tensor: repeated(tensor, times))


CPU = torch.device("cpu")
Make = Callable[[], MicroBatch]
"""Function that makes a micro-batch on the CPU, in any thread."""


class Watcher:
    """An observer of a trainer. This base class records nothing and permits every step."""

    def saw(self, index: int, micro: MicroBatch, loss: Loss) -> None:
        """Observe a micro-batch and its loss, with the index of the optimizer step.

        A watcher asks the trainer's ``readings`` for numbers of tensors. They are read before :meth:`may_step`.
        """

    def may_step(self, index: int, means: dict[str, float]) -> bool:
        """Return whether the weights may move at step ``index``, given the means over all ranks."""
        return True

    def write(self) -> None:
        """Write the record of the training. Collective."""

    def summary(self) -> dict[str, Any]:
        """Return numbers of the last optimizer step."""
        return {}


class Trainer(Stepper):
    """A policy of a diffusion model that an algorithm trains."""

    def __init__(
        self,
        model: Model,
        algorithm: Algorithm,
        weights: PolicyWeights,
        config: Update | Finetune,
        context: Context[Group],
    ) -> None:
        super().__init__(weights, config.steps, context)
        self.model, self.algorithm = model, algorithm
        self.param_dtype: ParamDtype = config.param_dtype
        self.watcher = Watcher()
        self._embedded_guidance_scale = model.embedded_guidance_scale
        # Found once, since a walk through the modules of a transformer takes milliseconds.
        self._dropouts = dropouts_of(model.transformer)

    @classmethod
    def load(
        cls,
        config: Update | Finetune,
        algorithm: Algorithm,
        *,
        request: Request,
        components: tuple[str, ...],
        context: Context[Group],
        copies: list[str],
        other: LoraConfig | None = None,
    ) -> "Trainer":
        """Load the Request's policy to continue its training. Copies that it lacks start equal to ``current``.

        ``other`` are the settings of an adapter of another shape, for other policies.
        """
        # The base is the reference, unless this policy has one of its own.
        reference = REFERENCE in algorithm.needs.roles and REFERENCE not in copies
        policy = request.one("policy")
        given = {"components": components, "context": context, "reference": reference, "other": other}
        model, weights = load_policy(request, config, **given)
        if config.gradient_checkpointing:
            model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
        for part in copies:
            found = read_part(policy, part, weights.shards, context.progress, group=context.ranks)
            weights.create(part, found or None)
        trainer = cls(model, algorithm, weights, config, context)
        trainer.resume(policy)
        return trainer

    def step(self, index: int, micro_batches: Iterable[MicroBatch], num_samples: int, num_times: int) -> bool:
        """Do one optimizer step from this rank's micro-batches; ``num_samples`` counts the samples of all ranks.
        Collective.

        A metric is the mean over the samples and noise levels that have it. Returns whether training continues, which
        the watcher decides. If the watcher refuses the step, or gradients are not finite, no weights change, and the
        row of metrics has a learning rate of 0 and NaN as the gradient norm. Raises :class:`DivergenceError`, on all
        ranks, after more than ``max_nonfinite`` consecutive non-finite steps.
        """
        sums = _Sums(num_samples * num_times)
        for made in micro_batches:
            self.sign_of_life(index)
            micro = made.to(self.group.device)
            # Also during the backward pass: gradient checkpointing repeats the forward there.
            with dropping(self._dropouts, micro.keys):
                loss = self._loss(micro)
                self.watcher.saw(index, micro, loss)
                loss_share(loss.per_sample, num_samples, num_times, micro.weight).backward()
            for name, value in {"loss": loss.per_sample.detach(), **loss.metrics}.items():
                sums.want(self.readings, name, value, micro.weight)
        self.read()
        totals, counts, highest = self._over_ranks(sums)
        # The loss is the sum whose gradient is taken. Media may have a loss at fewer levels than the samples.
        means = {name: total * (1.0 if name == "loss" else sums.every / counts[name]) for name, total in totals.items()}
        row: dict[str, float] = {"step": self.steps.first_step + index}
        # The gradient norm of a step that is refused is left out: far from the behaviour, gradients may overflow.
        goes_on = self.watcher.may_step(index, means)
        row |= (self.move(index) if goes_on else None) or {"grad_norm": math.nan, "lr": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        self.rows.append(row | means | highest)
        return goes_on

    def _loss(self, micro: MicroBatch) -> Loss:
        before = _versions(micro.batch)
        loss = self.algorithm.loss(self.velocities(micro), micro.batch)
        name = f"{type(self.algorithm).__module__}: loss()"
        if loss.per_sample.shape != micro.batch.t.shape:
            found = f"found shape {list(loss.per_sample.shape)}, expected {list(micro.batch.t.shape)}"
            raise ConfigError(f"{name} must return one number per sample: {found}")
        if loss.per_sample.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"{name} must return float32 or float64, found {loss.per_sample.dtype}")
        if changed := [field for field, version in _versions(micro.batch).items() if version != before[field]]:
            raise ConfigError(f"{name} changes {', '.join(changed)} of its batch in place; make a new tensor")
        if wrong := [metric for metric, value in loss.metrics.items() if value.shape != micro.batch.t.shape]:
            raise ConfigError(f"{name} must return one number per sample in each metric; change: {', '.join(wrong)}")
        return loss

    def velocities(self, micro: MicroBatch) -> Callable[[str], Tensor]:
        """Return a function that gives a policy part's prediction of the velocity for a micro-batch on the device.

        The prediction has the shape of ``micro.batch.x_t``. Only ``current`` has gradients.
        """
        x_t, t = micro.batch.x_t, micro.batch.t.float()
        own = micro.embedded_guidance_scale
        self.model.embedded_guidance_scale = self._embedded_guidance_scale if own is None else own
        # Repeated on the device, so that each sample's conditioning is copied there once for all its levels.
        conditioning = _rows(micro.conditioning, micro.levels)
        negative = None if micro.negative is None else _rows(micro.negative, micro.levels)

        def velocity(part: str) -> Tensor:
            keys = micro.keys if part == CURRENT else ()
            with (
                self.weights.use(micro.behaviour if part == BEHAVIOUR else part),
                computes_in(self.param_dtype, self.group.device),
                dropping(self._dropouts, keys),
            ):
                return guided_velocity(
                    self.model,
                    x_t,
                    t,
                    conditioning,
                    negative,
                    micro.guidance_scale,
                    trains_unconditional=self.algorithm.needs.trains_unconditional,
                )

        return velocity

    def _over_ranks(self, sums: "_Sums") -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return sums, counts and maxima over all ranks, by name. A rank may have had batches of one kind only."""
        # Context-parallel peers had the same losses, which count once.
        once = [sums.totals, sums.counts] if self.group.leads else [{}, {}]
        all_totals, all_counts, all_peaks = zip(*self.group.gather([*once, sums.peaks]), strict=True)
        highest = {name: np.max([each.get(name, -math.inf) for each in all_peaks]) for name in set().union(*all_peaks)}
        named = {f"{name}_max": float(number) for name, number in sorted(highest.items())}
        return _summed(all_totals), _summed(all_counts), named


def _versions(batch: Batch | Transitions) -> dict[str, int]:
    """Return how often each tensor of a batch was changed in place."""
    return {name: value._version for name, value in vars(batch).items() if isinstance(value, Tensor)}


class _Sums:
    """Sums, counts and maxima of a rank's metrics by name, filled when the readings of a step are read."""

    def __init__(self, every: int) -> None:
        self.every = every
        """Number of samples times number of noise levels of the optimizer step."""
        self.totals: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.peaks: dict[str, float] = {}

    def want(self, readings: Readings, name: str, value: Tensor, weight: float) -> None:
        """Reduce a metric ``[B]`` on the device, and add its numbers when they are read."""
        has_peak = name in PEAKS and weight != 0
        self.counts[name] = self.counts.get(name, 0.0) + value.numel() * weight

        def take(numbers: list[float]) -> None:
            share = numbers[0] * weight / self.every
            self.totals[name] = self.totals.get(name, 0.0) + share
            if has_peak:
                self.peaks[name] = float(np.maximum(self.peaks.get(name, -math.inf), numbers[1]))

        reduced = [value.double().sum(), value.max().double()] if has_peak else [value.double().sum()]
        readings.want(torch.stack(reduced), take)


def _summed(every: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sum over ranks of each number, by its name."""
    return {name: sum(each.get(name, 0.0) for each in every) for name in sorted(set().union(*every))}
