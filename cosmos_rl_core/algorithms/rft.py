"""Rejection fine-tuning: supervised steps on the best rewarded samples of each prompt. arXiv:2304.06767."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from cosmos_rl_core.algorithms._advantages import HELD, rewards_of
from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.config.train import RewardedOptions
from cosmos_rl_core.weights.parts import CURRENT, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from torch import Tensor


class Options(RewardedOptions):
    """Rejection fine-tuning: the loss of supervised training on generated samples."""

    type: Literal["rft"]  # pyright: ignore[reportIncompatibleVariableOverride]
    keep: float = Field(default=0.25, gt=0, le=1)
    """Share of each prompt's scored samples that are trained on, rounded up: the samples with the highest rewards.
    Lower takes fewer and better samples; 1 trains on all, whatever their rewards."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the squared distance to the base model; 0 saves the reference's forward pass."""
    timesteps_fraction: float = Field(default=0.99, gt=0, le=1)
    """Share of the rollout's noise levels that each sample is trained on, rounded down: .99 of 10 is 9."""
    min_group_size: int = Field(default=2, ge=2)
    """Prompts with fewer scored samples than this are left out of the update."""


class Algorithm:
    """Rollouts by the current policy. The loss pulls the velocity towards the best samples, and away from none."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.needs = Needs(
            roles=(CURRENT, REFERENCE) if options.kl_beta > 0 else (CURRENT,),
            timesteps_fraction=options.timesteps_fraction,
        )

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Return ``samples`` with ``used``, and ``advantage``: 1 for the samples that are used, NaN for the others.

        The share ``keep`` of each prompt's samples with the highest rewards is used. If rewards are equal, samples that
        gates do not hold back come first, then earlier ones. Prompts whose rewards are all equal are left out, unless
        all samples are kept: nothing says which samples are better.
        Raises :class:`ArtifactError` if a valid sample has a reward that is not finite.
        """
        rewards, prompts = rewards_of(samples, "reward"), samples["prompt_id"].to_numpy()
        held = samples[HELD].to_numpy(bool) if HELD in samples else np.zeros(len(samples), bool)
        used = np.zeros(len(samples), bool)
        for prompt in np.unique(prompts):
            members = np.flatnonzero((prompts == prompt) & ~np.isnan(rewards))
            says_nothing = np.ptp(rewards[members]) == 0 if len(members) else True
            if len(members) < self.options.min_group_size or (says_nothing and self.options.keep < 1):
                continue
            ranked = members[np.lexsort((held[members], -rewards[members]))]
            used[ranked[: math.ceil(self.options.keep * len(ranked))]] = True
        return samples.assign(advantage=np.where(used, 1.0, np.nan), used=used)

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch) -> Loss:
        """Return the mean over generated dimensions of ``(v - (noise - x_0))²``, ``[B]`` float32, plus ``kl_beta``
        times the squared distance to the reference.

        The metric ``kl`` exists only if ``kl_beta`` > 0.
        Source: RAFT, arXiv:2304.06767, with the flow-matching loss of supervised training.
        """
        reference = velocity(REFERENCE).detach() if self.options.kl_beta > 0 else None
        current = velocity(CURRENT)
        error = batch.mean((current - (batch.noise - batch.x_0)).square())
        metrics, total = {"policy_loss": error}, error
        if reference is not None:
            metrics["kl"] = batch.mean((current - reference).square())
            total = error + self.options.kl_beta * metrics["kl"]
        return Loss(total, {name: value.detach() for name, value in metrics.items()})
