"""Optimizer steps on a policy, for any algorithm. Shared by `update` and `finetune`."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, tee
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core.algorithms._base import Algorithm, Batch, Loss, Transitions
from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.errors import ArtifactError, ConfigError, CosmosRLError, DivergenceError
from cosmos_rl_core.models._base import Conditioning, Model, guided_velocity
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.parallel.sharding import Shards
from cosmos_rl_core.storage import store
from cosmos_rl_core.training.optimizer import (
    load_optimizer_state,
    loss_share,
    make_optimizer,
    optimizer_state,
    optimizer_step,
    state_shards,
)
from cosmos_rl_core.weights.lora_dropout import DropoutKey, dropouts_of, dropping
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, EMA, OPTIMIZER, REFERENCE, SCHEDULE
from cosmos_rl_core.weights.policy_weights import PolicyWeights, to_bytes
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.context import Context
from stages.contracts import METRICS, Finetune, Update
from stages.formats.policies import read_part, write_part
from stages.formats.tables import to_parquet
from stages.training.loading import load_policy

CLOCKS = f"{SCHEDULE}/clocks.json"
NONFINITE = "nonfinite_steps"
"""Steps skipped for non-finite gradients: in the clocks the consecutive ones at the end, in the summary all."""
PEAKS = ("loss", "policy_loss", "kl", "data_loss", "old_deviation")
"""Metrics whose maximum over samples is recorded beside their mean; NaN if any value is."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass. Weight 0 pads a rank that has fewer, so that all do the same number."""

    batch: Batch | Transitions
    conditioning: Conditioning
    weight: float = 1.0
    negative: Conditioning | None = None
    """Conditioning of the negative prompt; None without guidance."""
    guidance_scale: float = 1.0
    names: tuple[str, ...] = ()
    """The samples' keys, for the watcher; empty if it does not need them."""
    steps: tuple[int, ...] = ()
    """The recorded step of each."""
    behaviour: str = BEHAVIOUR
    """Name of the weights that made the samples' rollout."""
    keys: tuple[DropoutKey, ...] = ()
    """Keys of each sample's dropout; empty if nothing may be dropped."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch on a device."""
        negative = None if self.negative is None else _to(self.negative, device)
        return replace(
            self, batch=self.batch.to(device), conditioning=_to(self.conditioning, device), negative=negative
        )


def _to(conditioning: Conditioning, device: torch.device) -> Conditioning:
    return {name: tensor.to(device) for name, tensor in conditioning.items()}


CPU = torch.device("cpu")
Make = Callable[[], MicroBatch]
"""Makes a micro-batch on the CPU, in any thread."""


class Watcher:
    """Observes a trainer. This base class does nothing, records nothing and permits every step."""

    def saw(self, index: int, micro: MicroBatch, loss: Loss) -> None:
        """Observe a micro-batch and its loss, with the index of the optimizer step."""

    def may_step(self, index: int, means: dict[str, float]) -> bool:
        """Return whether the weights may move at step ``index``, given the means over all ranks."""
        return True

    def write(self) -> None:
        """Write the record of the training. Collective."""

    def summary(self) -> dict[str, Any]:
        """Return numbers of the last optimizer step."""
        return {}


class Trainer:
    """A policy with its copies, optimizer and clocks. All ranks do the same steps, each on its share of the work."""

    nonfinite_in_a_row: int = 0
    """Consecutive optimizer steps skipped until now because their gradients were not finite."""

    def __init__(
        self, model: Model, algorithm: Algorithm, weights: PolicyWeights, config: Update | Finetune, context: Context
    ) -> None:
        self.model, self.algorithm, self.weights, self.context = model, algorithm, weights, context
        self.steps, self.group = config.steps, context.ranks
        self.param_dtype: ParamDtype = config.param_dtype
        self.watcher = Watcher()
        # Found once, since a walk through the modules of a transformer takes milliseconds.
        self._dropouts = dropouts_of(model.transformer)
        self.rows: list[dict[str, float]] = []
        self._num_nonfinite = 0
        settings = {"betas": self.steps.betas, "eps": self.steps.epsilon, "weight_decay": self.steps.weight_decay}
        self.optimizer = make_optimizer(weights.parameters, self.steps.optimizer, **settings)

    @classmethod
    def load(
        cls,
        config: Update | Finetune,
        algorithm: Algorithm,
        *,
        request: Request,
        components: tuple[str, ...],
        context: Context,
        copies: list[str],
    ) -> "Trainer":
        """Load the Request's policy to continue its training. Copies that it lacks start equal to ``current``."""
        # The base is the reference, unless this policy has one of its own.
        reference = REFERENCE in algorithm.needs.roles and REFERENCE not in copies
        policy = request.one("policy")
        model, weights = load_policy(request, config, components=components, context=context, reference=reference)
        if config.gradient_checkpointing:
            model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
        for part in copies:
            weights.create(part, read_part(policy, part, weights.shards, context.progress) or None)
        trainer = cls(model, algorithm, weights, config, context)
        trainer.nonfinite_in_a_row = _clocks(policy).get(NONFINITE, 0)
        state = read_part(policy, OPTIMIZER, state_shards(weights.shards), context.progress)
        load_optimizer_state(trainer.optimizer, weights.parameters, state)
        return trainer

    def step(self, index: int, micro_batches: Iterable[MicroBatch], num_samples: int, num_times: int) -> bool:
        """Do one optimizer step from this rank's micro-batches; ``num_samples`` counts the samples of all ranks.
        Collective.

        Returns whether training continues, which the watcher decides. A step that the watcher refuses, or whose
        gradients are not finite, changes no weights: its row has a learning rate of 0 and no gradient norm. Raises
        :class:`DivergenceError`, on all ranks, after more than ``max_nonfinite`` consecutive non-finite steps.
        """
        totals: dict[str, float] = {}
        peaks: dict[str, float] = {}
        for made in micro_batches:
            self._sign_of_life(index)
            micro = made.to(self.group.device)
            # Also during the backward pass: gradient checkpointing repeats the forward there.
            with dropping(self._dropouts, micro.keys):
                loss = self._loss(micro)
                self.watcher.saw(index, micro, loss)
                loss_share(loss.per_sample, num_samples, num_times, micro.weight).backward()
            for name, value in {"loss": loss.per_sample.detach(), **loss.metrics}.items():
                share = float(value.double().sum()) * micro.weight / (num_samples * num_times)
                totals[name] = totals.get(name, 0.0) + share
                if name in PEAKS and micro.weight:
                    peaks[name] = float(np.maximum(peaks.get(name, -math.inf), float(value.max())))
        means, highest = self._over_ranks(totals, peaks)
        row: dict[str, float] = {"step": self.steps.first_step + index}
        # After a refusal the gradient norm is not computed: far from the behaviour, gradients may overflow.
        goes_on = self.watcher.may_step(index, means)
        self.weights.collect_gradients()
        row |= (self.move(index) if goes_on else None) or {"grad_norm": math.nan, "lr": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        self.rows.append(row | means | highest)
        return goes_on

    def move(self, index: int) -> dict[str, float] | None:
        """Move the weights by the gradients, and update the average. Collective.

        Returns gradient norm and learning rate; None if the step is skipped. All ranks decide alike, because the norm
        is that of the gradients summed over ranks.
        """
        steps = self.steps
        try:
            moved = optimizer_step(
                self.optimizer,
                self.weights.parameters,
                lr=steps.lrs[index],
                max_norm=steps.grad_norm_clip,
                group=self.group,
                shards=self.weights.shards,
            )
        except DivergenceError as error:
            if self.nonfinite_in_a_row >= steps.max_nonfinite:
                raise
            self.nonfinite_in_a_row += 1
            self._num_nonfinite += 1
            in_a_row = f"{self.nonfinite_in_a_row} in a row, at most {steps.max_nonfinite} are allowed"
            self.context.outcome.note(f"optimizer step {steps.first_step + index} is skipped ({in_a_row}): {error}")
            return None
        self.nonfinite_in_a_row = 0
        if (decay := steps.ema_decays[index]) is not None:
            self.weights.lerp_(EMA, decay)
        return moved

    def _sign_of_life(self, finished: int) -> None:
        """Report the number of finished steps; stall detection watches it."""
        self.context.progress("training", finished, len(self.steps.lrs))

    def _loss(self, micro: MicroBatch) -> Loss:
        batch = micro.batch
        x_t, t = batch.x_t, batch.t.float()

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
                    micro.conditioning,
                    micro.negative,
                    micro.guidance_scale,
                    trains_unconditional=self.algorithm.needs.trains_unconditional,
                )

        loss = self.algorithm.loss(velocity, batch)
        if loss.per_sample.shape != t.shape:
            found = f"found shape {list(loss.per_sample.shape)}, expected {list(t.shape)}"
            raise ConfigError(f"the algorithm's loss must be one number a sample: {found}")
        return loss

    def _over_ranks(
        self, totals: dict[str, float], peaks: dict[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the sums and the maxima of all ranks, by name. A rank may have had batches of one kind only."""
        # Context-parallel peers had the same losses, which count once.
        found = self.group.gather([totals if self.group.leads else {}, peaks])
        all_totals, all_peaks = zip(*found, strict=True)
        names = sorted(set().union(*all_totals))
        sums: dict[str, float] = {name: sum(each.get(name, 0.0) for each in all_totals) for name in names}
        highest = {name: np.max([each.get(name, -math.inf) for each in all_peaks]) for name in set().union(*all_peaks)}
        return sums, {f"{name}_max": float(number) for name, number in sorted(highest.items())}

    def write(self, copies: list[str], iteration: int) -> None:
        """Write the next policy version, once all ranks agree on its tensors. Collective.

        The clocks' optimizer step is the planned one, also if training on these rollouts ended early.
        """
        self._sign_of_life(len(self.rows))
        parts = {part: self.weights.here(part) for part in (CURRENT, *copies)}
        parts[OPTIMIZER] = optimizer_state(self.optimizer, self.weights.parameters)
        shards = self.weights.shards
        cuts = {part: state_shards(shards) if part == OPTIMIZER else shards for part in parts}
        self._agree(parts, cuts)
        for part, tensors in parts.items():
            write_part(self.context, part, tensors=tensors, shards=cuts[part])
        if self.group.rank == 0:
            last_step = self.steps.first_step + len(self.steps.lrs)
            nonfinite = {NONFINITE: self.nonfinite_in_a_row} if self.nonfinite_in_a_row else {}
            self.context.attempt.put_json(
                CLOCKS, {"iteration": iteration + 1, "optimizer_step": last_step, **nonfinite}
            )
            self.context.attempt.put(METRICS, to_parquet(pd.DataFrame(self.rows)))

    def _agree(self, parts: dict[str, dict[str, Tensor]], cuts: dict[str, Shards]) -> None:
        """Raise :class:`CosmosRLError` unless ranks that hold the same rows hold the same bits. Collective."""
        if self.group.world_size == 1:
            return
        digests: dict[str, str] = {}
        for part, tensors in parts.items():
            for name, tensor in tensors.items():
                place = f"rows {cuts[part].index} of {part}" if cuts[part].cuts(name) else part
                digests[place] = sha256(digests.get(place, "").encode() + to_bytes({name: tensor}))
        found = self.group.gather(digests)
        unequal = [place for place, mine in digests.items() if any(one.get(place, mine) != mine for one in found)]
        if unequal:
            raise CosmosRLError(
                f"the ranks ended with different tensors in {', '.join(unequal)}; "
                "a collective or a kernel does not give equal bits on all ranks"
            )

    def summary(self) -> dict[str, Any]:
        """Return the last step's loss and gradient norm, None if not finite, and the number of skipped steps."""
        left_out = {NONFINITE: self._num_nonfinite} if self._num_nonfinite else {}
        return self.last("loss", "grad_norm") | left_out

    def last(self, *names: str) -> dict[str, float | None]:
        """Return numbers of the last step; None for one that is not finite."""
        return {name: value if math.isfinite(value := self.rows[-1][name]) else None for name in names}


def check_clocks(policy: Input, iteration: int, first_step: int) -> None:
    """Raise :class:`ArtifactError` unless both clocks of the policy are at the start of this range of steps.

    Policy version 0 has no clocks: it is at 0.
    """
    expected = {"iteration": iteration, "optimizer_step": first_step}
    found = {name: value for name, value in _clocks(policy).items() if name != NONFINITE}
    if found != expected:
        raise ArtifactError(f"the policy at {policy.url} has clocks {found}, this range begins at {expected}")


def _clocks(policy: Input) -> dict[str, int]:
    artifact = Artifact(policy)
    return artifact.json(CLOCKS) if artifact.names(CLOCKS) else {"iteration": 0, "optimizer_step": 0}


def my_share(items: list[list[Callable[[float], MicroBatch]]], group: Group) -> list[Make]:
    """Return what makes this rank's micro-batches: those of every ``data_world_size``-th item.

    An item's micro-batches are the noise levels of the same samples, so that a rank reads its own samples only. Ranks
    with fewer items repeat one with weight 0: all do the same number of passes.
    """
    share: list[Make] = []
    for first in range(0, len(items), group.data_world_size):
        index = first + group.data_rank
        weight = 1.0 if index < len(items) else 0.0
        share += [partial(make, weight) for make in items[index if weight else first]]
    return share


@contextmanager
def made_ahead(shares: Iterable[list[Make]]) -> Iterator[Iterator[Iterator[MicroBatch]]]:
    """Give the micro-batches of each optimizer step, made in the background while earlier ones compute.

    Memory holds a few of them (:func:`cosmos_rl_core.storage.store.ahead`). What fails to be made raises in its turn.
    The threads end with the context.
    """
    shares, again = tee(shares)
    with closing(store.ahead(chain.from_iterable(shares), lambda make: make())) as made:
        yield ((micro for _, micro in islice(made, len(share))) for share in again)
