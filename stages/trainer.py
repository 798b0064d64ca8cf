"""Optimizer steps on a policy, whatever the algorithm: what `update` and `finetune` share."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from cosmos_rl_core.algorithms._base import Algorithm, Batch, Loss
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.distributed import Group
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.models._base import Conditioning, Model
from cosmos_rl_core.policy_weights import CURRENT, PolicyWeights
from cosmos_rl_core.training import load_optimizer_state, loss_share, make_optimizer, optimizer_state, optimizer_step
from stages.artifacts import Artifact, Attempt
from stages.contracts import Input, OptimizerSteps
from stages.policy import load_policy, read_part, write_part
from stages.samples import to_parquet

METRICS = "metrics.parquet"
CLOCKS = "schedule/clocks.json"


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass; weight 0 pads a rank that has fewer, so that all do the same number."""

    batch: Batch
    conditioning: Conditioning
    weight: float = 1.0


@dataclass
class Trainer:
    """A policy with its copies, optimizer and clocks. Every rank does the same steps, on its share of the work."""

    model: Model
    algorithm: Algorithm
    weights: PolicyWeights
    steps: OptimizerSteps
    group: Group
    rows: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps = self.steps
        self.optimizer = make_optimizer(
            self.weights.parameters, betas=steps.betas, epsilon=steps.epsilon, weight_decay=steps.weight_decay
        )

    @classmethod
    def load(
        cls,
        model: Model,
        algorithm: Algorithm,
        lora: LoraConfig | None,
        policy: Input,
        steps: OptimizerSteps,
        group: Group,
        copies: list[str],
    ) -> "Trainer":
        """Take up the policy where the last stage left it; a copy that it does not have yet starts as ``current``."""
        reference = "reference" in algorithm.roles
        weights = load_policy(model.transformer, lora, policy, reference=reference)
        for part in copies:
            weights.create(part, read_part(policy, part) or None)
        trainer = cls(model, algorithm, weights, steps, group)
        load_optimizer_state(trainer.optimizer, weights.parameters, read_part(policy, "optimizer"))
        return trainer

    def step(self, index: int, micro_batches: list[MicroBatch], num_samples: int, num_times: int) -> None:
        """One optimizer step from this rank's micro-batches; ``num_samples`` counts those of all ranks."""
        totals: dict[str, float] = {}
        for micro in micro_batches:
            loss = self._loss(micro)
            weights = torch.full_like(loss.per_sample.detach(), micro.weight, device=self.group.device)
            loss_share(loss.per_sample, num_samples, num_times, weights).backward()
            values = {"loss": loss.per_sample.detach(), **loss.metrics}
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + float(value.double().sum()) * micro.weight / (
                    num_samples * num_times
                )
        means = self._over_ranks(totals)
        norms = optimizer_step(
            self.optimizer,
            self.weights.parameters,
            lr=self.steps.lrs[index],
            max_norm=self.steps.grad_norm_clip,
            group=self.group,
        )
        if (decay := self.steps.ema_decays[index]) is not None:
            self.weights.lerp_("ema", decay)
        self.rows.append({"step": self.steps.first_step + index, **norms, **means})

    def _loss(self, micro: MicroBatch) -> Loss:
        batch = micro.batch
        x_t = batch.x_t

        def velocity(part: str) -> Tensor:
            with self.weights.use(part):
                return self.model.velocity(x_t, batch.t, micro.conditioning)

        return self.algorithm.loss(velocity, batch)

    def _over_ranks(self, totals: dict[str, float]) -> dict[str, float]:
        names = sorted(totals)
        values = torch.tensor([totals[name] for name in names], dtype=torch.float64, device=self.group.device)
        return dict(zip(names, self.group.all_reduce_sum_(values).tolist(), strict=True))

    def write(self, attempt: Attempt, copies: list[str], iteration: int) -> None:
        """Write the next policy version: rank 0, after all ranks agree on the weights."""
        self._agree()
        if self.group.rank != 0:
            return
        for part in (CURRENT, *copies):
            write_part(attempt, part, self.weights.get(part))
        write_part(attempt, "optimizer", optimizer_state(self.optimizer, self.weights.parameters))
        attempt.put_json(CLOCKS, {"iteration": iteration + 1, "optimizer_step": self.steps.first_step + len(self.rows)})
        attempt.put(METRICS, to_parquet(pd.DataFrame(self.rows)))

    def _agree(self) -> None:
        tensors = self.weights.get(CURRENT).values()
        digest = hashlib.sha256(
            b"".join(t.view(torch.uint8).numpy().tobytes() if t.ndim else b"" for t in tensors)
        ).hexdigest()
        if len(set(self.group.gather(digest))) != 1:
            raise CosmosRLError(
                "the ranks ended with different weights; a collective or a kernel is not what it should be"
            )

    def summary(self) -> dict[str, Any]:
        """The last step's numbers."""
        last = self.rows[-1]
        return {"loss": last["loss"], "grad_norm": last["grad_norm"]}


def check_clocks(policy: Input, iteration: int, first_step: int) -> None:
    """Both clocks of the policy must be where this range of steps begins; version 0 has none and is at 0."""
    artifact = Artifact(policy)
    expected = {"iteration": iteration, "optimizer_step": first_step}
    found = artifact.json(CLOCKS) if artifact.names(CLOCKS) else {"iteration": 0, "optimizer_step": 0}
    if found != expected:
        raise ArtifactError(f"the policy at {policy.url} has clocks {found}, this range begins at {expected}")


def my_share(items: list[Callable[[float], MicroBatch]], group: Group) -> list[MicroBatch]:
    """This rank's micro-batches, every ``world_size``-th; padded with weight 0 to the same number on all ranks."""
    rounds = -(-len(items) // group.world_size)
    indices = [turn * group.world_size + group.rank for turn in range(rounds)]
    return [items[i](1.0) if i < len(items) else items[0](0.0) for i in indices]
