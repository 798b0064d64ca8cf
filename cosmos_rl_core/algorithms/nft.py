"""DiffusionNFT: pull the velocity towards well rewarded samples and away from badly rewarded ones. arXiv:2509.16117."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cosmos_rl_core.algorithms._advantages import Mixing, group_advantages, rewards_of
from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.config.train import RewardedOptions
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, OLD, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from torch import Tensor

_WEIGHT_FLOOR = 1e-5
"""Smallest mean absolute error that a sample's squared error is divided by."""
_DECAYS = {"none": (0, 0.0, 0.0), "linear": (0, 0.001, 0.5), "delayed": (75, 0.0075, 0.999)}
"""Decay of the old copy by ``weight_copy_decay_type``: iteration from which it rises, rise per iteration, maximum."""


class Options(RewardedOptions):
    """DiffusionNFT. Names are cosmos-rl's."""

    type: Literal["nft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    kl_beta: float = Field(default=1e-4, ge=0)
    """Weight of the squared distance to the base model; 0 saves the reference's forward pass."""
    advantage_low: float = Field(default=-5.0, le=0)
    """Advantages are clamped to at least this."""
    advantage_high: float = Field(default=5.0, gt=0)
    """Advantages are clamped to at most this, where a sample counts as good with probability 1. It also scales the
    policy loss."""
    nft_beta: float = Field(default=1.0, gt=0)
    """Distance of the implied good and bad policies from the old one. Lower moves the optimum further from it."""
    weight_copy_decay_type: Literal["none", "linear", "delayed"] = "linear"
    """Decay of the old copy, by iteration. ``none``: always 0, so that old is a copy of the current policy. ``linear``:
    rises from 0 by 0.001 per iteration to 0.5. ``delayed``: 0 up to iteration 75, then rises by 0.0075 to 0.999."""
    weight_copy_first_step: Literal[0, 1] = 0
    """Number of the first iteration in that schedule. cosmos-rl counts from 1, so its first ``linear`` copy keeps 0.001
    of the old weights instead of 0."""
    timesteps_fraction: float = Field(default=0.99, gt=0, le=1)
    """Share of the rollout's noise levels that each sample is trained on, rounded down: .99 of 10 is 9."""
    global_std: bool = True
    """Divide advantages by the deviation of all rewards of the iteration instead of the prompt's own."""
    mixing: Mixing = Field(default="sum", json_schema_extra={"neutral": "sum"})
    """How several rewards become one. ``sum`` adds weighted scores, so that one of large scale outweighs the others.
    ``gdpo`` (arXiv:2601.05242) first normalises each reward within its prompt, then adds them by their weights, then
    divides by the deviation over the iteration; it needs global_std = false."""
    unbiased_std: bool = False
    """Divide by the sample deviation, over n - 1, like cosmos-rl does with rewards of a service. With n rewards it is
    sqrt(n / (n - 1)) times the population's: 2 % more for 24, 41 % more for 2."""
    min_group_size: int = Field(default=2, ge=2)
    """Prompts with fewer scored samples than this are left out of the update."""

    @model_validator(mode="after")
    def _mixes_once(self) -> Self:
        if self.mixing == "gdpo" and self.global_std:
            raise ValueError("mixing = 'gdpo' normalises rewards within their prompts; set global_std = false")
        return self

    @model_validator(mode="after")
    def _copies_remember(self) -> Self:
        if self.weight_copy_first_step and self.weight_copy_decay_type == "none":
            raise ValueError("weight_copy_first_step = 1 without effect: weight_copy_decay_type = 'none' is always 0")
        return self

    def old_decay(self, iteration: int) -> float:
        """Return the decay of the old copy after a 0-based iteration; 0 makes it a copy of the current policy."""
        flat, rise, ceiling = _DECAYS[self.weight_copy_decay_type]
        iteration += self.weight_copy_first_step
        return 0.0 if iteration < flat else min(rise * (iteration - flat), ceiling)


class Algorithm:
    """Rollouts by a slow ``old`` copy. The loss reflects the trained velocity about the prediction of that copy."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.needs = Needs(
            behaviour=OLD,
            # The reference is read only if the loss weighs it.
            roles=(CURRENT, BEHAVIOUR, REFERENCE) if options.kl_beta > 0 else (CURRENT, BEHAVIOUR),
            timesteps_fraction=options.timesteps_fraction,
            old_decay=options.old_decay,
            off_policy=True,
        )

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Return ``samples`` with advantages by :func:`group_advantages`.

        Samples with equal rewards get exactly 0 and are still used. Raises :class:`ArtifactError` if a valid sample has
        a reward that is not finite.
        """
        options = self.options
        advantages = group_advantages(
            rewards_of(samples, "reward"),
            samples["prompt_id"].to_numpy(),
            min_group_size=options.min_group_size,
            global_std=options.global_std or options.mixing == "gdpo",
            ddof=int(options.unbiased_std),
        )
        return samples.assign(advantage=advantages, used=~np.isnan(advantages))

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch) -> Loss:
        """Return the policy loss plus ``kl_beta`` times the squared distance to the reference, ``[B]`` float32.

        At equal old and current the policy loss does not depend on rewards, only its gradient does: watch
        ``old_deviation`` and ``kl``, not the loss. The metric ``kl`` exists only if ``kl_beta`` > 0.
        Source: DiffusionNFT, arXiv:2509.16117, with the adaptive weight of its released code.
        """
        optimality = self._optimality(batch)
        old = velocity(BEHAVIOUR).detach()
        reference = velocity(REFERENCE).detach() if self.options.kl_beta > 0 else None
        current = velocity(CURRENT)

        beta = self.options.nft_beta
        towards, away = _error(current, old, batch, beta), _error(current, old, batch, -beta)
        policy = self.options.advantage_high / beta * (optimality * towards + (1 - optimality) * away)
        metrics = {
            "policy_loss": policy,
            "old_deviation": batch.mean((current - old).square()),
            "optimality": optimality,
        }
        total = policy
        if reference is not None:
            metrics["kl"] = batch.mean((current - reference).square())
            total = policy + self.options.kl_beta * metrics["kl"]
        return Loss(total, {name: value.detach() for name, value in metrics.items()})

    def _optimality(self, batch: Batch) -> Tensor:
        """Return the probability that a sample is good, ``[B]``: 1/2 at advantage 0, 1 at ``advantage_high``."""
        assert batch.advantages is not None
        low, high = self.options.advantage_low, self.options.advantage_high
        return (batch.advantages.clamp(low, high) / (2 * high) + 0.5).clamp(0, 1)


def _error(current: Tensor, old: Tensor, batch: Batch, beta: float) -> Tensor:
    """Return the squared error of x_0 over its mean absolute error at ``beta current + (1 - beta) old``: ``[B]``.

    No gradient flows through the divisor. The error of x_0 is ``t (noise - x_0 - velocity)``, in that form because
    ``x_t - t velocity - x_0`` loses its digits at small t.
    """
    # old + beta (current - old) is exactly old at current = old, so that both signs cancel to a gradient of exactly 0.
    mixed = old + beta * (current - old)
    error = batch.t.view(batch.per_sample) * (batch.noise - batch.x_0 - mixed)
    weight = batch.mean(error.detach().double().abs()).clamp(min=_WEIGHT_FLOOR)
    return batch.mean(error.square()) / weight.to(error.dtype)
