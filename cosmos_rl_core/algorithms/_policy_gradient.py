"""Policy gradients on a sampler's stochastic steps: DDRL (arXiv:2512.04332) and FlowGRPO (arXiv:2505.05470).

Each step draws from a normal distribution whose mean is linear in the velocity, so that the likelihood of a recorded
step under any weights has a closed form. The two algorithms differ in their defaults only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from cosmos_rl_core.algorithms._advantages import HELD, Mixing, at_lowest, group_advantages, rewards_of
from cosmos_rl_core.algorithms._base import Batch, Loss, Transitions
from cosmos_rl_core.algorithms._needs import DataTerm, Needs
from cosmos_rl_core.config.base import written
from cosmos_rl_core.config.train import AnyDataset, RewardedOptions
from cosmos_rl_core.sampling.transition import generated_mean, log_prob, mean, num_generated, square_error
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd
    from torch import Tensor


_OF_DATA = ("use_rl_sigma_and_noise", "data_on_first_only", "text_dropout")
"""Settings of the diffusion loss other than its weight."""


class PolicyGradientOptions(RewardedOptions):
    """Options of both algorithms. The defaults compute the exact log-density (mean over dimensions) and the exact KL.

    cosmos-rl's arithmetic: ``ratio_mode = "unnormalised"``, ``kl_mode = "unnormalised"``, ``parity_advantages = true``.
    FlowGRPO's: ``kl_mode = "flow_grpo"``, ``logp_old = "stored"``, ``loss_scale = 1``, ``global_std = true`` (up to the
    bias of its deviation), and under guidance ``train_unconditional = false``.
    """

    train_on: tuple[int, ...]
    """Steps of the sampler to train on, from 0; -1 is a random other step, drawn for every prompt."""
    clip_ratio: float = Field(default=1e-4, gt=0, lt=1)
    """Distance of the ratio from 1 beyond which a step gets no gradient, in the unit of ``ratio_mode``."""
    policy_weight: float = Field(default=1.0, ge=0, json_schema_extra={"neutral": 1.0})
    """Weight of the policy loss; 0 is a control with the other two terms alone."""
    kl_beta: float = Field(ge=0)
    """Weight of the distance to the reference; 0 saves its forward pass."""
    data_beta: float = Field(ge=0)
    """Weight of the diffusion loss on the dataset's media; 0 needs no media."""
    data: AnyDataset | None = None
    """Media of the diffusion loss and of given frames. Their captions need not be prompts of the rollouts."""
    loss_scale: float = Field(default=10.0, gt=0)
    """Factor of the whole loss. Adam divides it out again; the gradient norm that ``optm_grad_norm_clip`` bounds grows
    with it."""
    ratio_mode: Literal["mean_logp", "sum_logp", "unnormalised"] = "mean_logp"
    """Logarithm of the ratio. ``mean_logp``: its mean over dimensions. ``sum_logp``: the true one, the sum over
    dimensions. ``unnormalised``: cosmos-rl's, which omits the division by twice the variance and so gives noisy steps
    the most weight."""
    kl_mode: Literal["exact", "flow_grpo", "unnormalised"] = "exact"
    """Distance to the reference per dimension. ``exact``: the KL divergence. ``flow_grpo``: FlowGRPO's, the KL
    divergence times the length of the step. ``unnormalised``: cosmos-rl's, the squared distance of the means."""
    logp_old: Literal["recompute", "stored"] = "recompute"
    """Source of the ratio's denominator. With ``recompute`` the ratio is exactly 1 at the weights that made the
    rollout; with ``stored``, rounding differences between rollout and update change it."""
    max_logp_drift: float | None = Field(default=None, gt=0)
    """Largest difference of stored and recomputed log-density, in the unit of ``ratio_mode``. Beyond it the update
    fails, because it does not reproduce the rollout. Absent means half of ``clip_ratio``."""
    max_drift: float | None = Field(default=None, gt=0)
    """Largest mean ``approx_kl`` of an optimizer step. Beyond it the pass over the rollout stops; absent means never.
    It is about half the square of a typical log-ratio in the unit of ``ratio_mode``: 5e-9 at the default clip."""
    train_unconditional: bool = Field(default=True, json_schema_extra={"neutral": True})
    """Send the gradient through both predictions of guidance: the density of a step depends on both. False trains the
    conditional prediction alone, which takes less memory."""
    on_policy: bool = True
    """Generate rollouts with the current policy; false generates them with the reference."""
    update_ref_every_iter: int = Field(default=0, ge=0)
    """Iterations after which the reference becomes a copy of the current policy; 0 keeps the base model."""
    use_same_seed: bool = False
    """Start all samples of a prompt from the same noise, so that they differ by the sampler's noise only."""
    use_rl_sigma_and_noise: bool = True
    """Noise the media with the level of the trained step and the initial noise of its rollout; false draws both."""
    data_on_first_only: bool = False
    """Add the diffusion loss at the first trained step of each sample only, which divides it by the number of trained
    steps."""
    text_dropout: float = Field(default=0.2, ge=0, le=1)
    """Share of the media, in the diffusion loss only, whose prompt is replaced by the empty one."""
    # These two and `data` have no `neutral` value: they count in the identity also at their defaults.
    min_num_conditional_frames: int = Field(default=0, ge=0)
    """See :class:`AlgorithmOptions`."""
    max_num_conditional_frames: int = Field(default=0, ge=0)
    """See :class:`AlgorithmOptions`. The diffusion loss draws a number for each item and gives its own frames."""
    global_std: bool = False
    """Divide advantages by the deviation of all rewards of the iteration instead of the prompt's own."""
    min_group_size: int = Field(default=2, ge=2)
    """Prompts with fewer scored samples than this are left out of the update."""
    reward_average: bool = True
    """Average the advantages of all rewards, so that only the signs of the rewards' weights count; false takes the
    advantages of the weighted sum of rewards."""
    mixing: Mixing = Field(default="sum", json_schema_extra={"neutral": "sum"})
    """How several rewards become one. ``sum`` adds weighted scores, so that one of large scale outweighs the others.
    ``gdpo`` (arXiv:2601.05242) first normalises each reward within its prompt, then adds them by their weights, then
    divides by the deviation over the iteration; it needs reward_average and global_std = false."""
    exp_reward: bool = False
    """Replace an advantage A by -exp(-A), the transformation of DDRL's paper: negative, steep for bad samples."""
    adv_clip_min: float = Field(default=-5.0, le=0)
    """Advantages are clamped to at least this, after ``exp_reward``."""
    adv_clip_max: float = Field(default=5.0, gt=0)
    """Advantages are clamped to at most this, after ``exp_reward``."""
    parity_advantages: bool = False
    """Compute advantages like cosmos-rl, for comparisons only: a failed sample gets its prompt's mean reward, which
    shrinks the deviation, and ``exp_reward`` gives -1 to prompts of equal rewards. Prompts with fewer scores than
    ``min_group_size`` are still excluded: all their advantages would be invented."""

    @field_validator("train_on")
    @classmethod
    def _each_step_once(cls, train_on: tuple[int, ...]) -> tuple[int, ...]:
        listed = [step for step in train_on if step != -1]
        if not train_on or min(train_on) < -1 or len(set(listed)) != len(listed):
            raise ValueError("needs at least one step, each once and from 0; -1 is a random step, any number of times")
        return train_on

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if self.policy_weight == self.kl_beta == self.data_beta == 0:
            raise ValueError("policy_weight, kl_beta and data_beta are all 0: there is no loss")
        others = ("reward_average", "global_std", "parity_advantages")
        if self.mixing == "gdpo" and (given := [name for name in others if getattr(self, name)]):
            raise ValueError(f"mixing = 'gdpo' is another way to mix rewards: set {', '.join(given)} to false")
        if self.update_ref_every_iter > 0 and self.kl_beta == 0 and self.on_policy:
            raise ValueError(
                f"update_ref_every_iter = {self.update_ref_every_iter} renews a reference that nothing reads; "
                "set kl_beta above 0, on_policy = false, or leave it at 0"
            )
        if self.exp_reward and self.adv_clip_min == 0:
            raise ValueError("adv_clip_min = 0 cuts off every advantage of exp_reward, which are negative; lower it")
        return self

    def without_effect(self) -> Iterator[str]:
        """Yield a sentence for each term of the loss that has weight 0 although its own settings were set."""
        yield from super().without_effect()
        if self.kl_beta == 0 and (given := written(self, "kl_mode")):
            yield f"{given[0]} without effect: kl_beta = 0 leaves out the distance to the reference"
        if self.data_beta == 0 and (given := written(self, *_OF_DATA)):
            yield f"{', '.join(given)} without effect: data_beta = 0 leaves out the diffusion loss on media"


class Algorithm:
    """A clipped policy gradient at every trained step, a distance to the reference, a diffusion loss on media."""

    def __init__(self, options: PolicyGradientOptions) -> None:
        self.options = options
        limit = options.clip_ratio / 2 if options.max_logp_drift is None else options.max_logp_drift
        media = DataTerm(
            on_first_only=options.data_on_first_only,
            as_rollout=options.use_rl_sigma_and_noise,
            text_dropout=options.text_dropout,
            given_frames=options.given_frames,
        )
        self.needs = Needs(
            behaviour=CURRENT if options.on_policy else REFERENCE,
            # The reference and media are read only if the loss weighs them.
            roles=(CURRENT, BEHAVIOUR, REFERENCE) if options.kl_beta > 0 else (CURRENT, BEHAVIOUR),
            train_on=options.train_on,
            trains_unconditional=options.train_unconditional,
            diffusion=options.kl_mode == "flow_grpo" and options.kl_beta > 0,
            max_logp_drift=limit,
            max_drift=options.max_drift,
            data_term=media if options.data_beta > 0 else None,
            use_same_seed=options.use_same_seed,
            update_ref_every_iter=options.update_ref_every_iter,
        )

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Return ``samples`` with advantages by :func:`group_advantages`, then ``exp_reward``, then the bounds.

        With ``reward_average`` they are the mean of the advantages of each column ``reward.<name>``; else the
        advantages of ``reward``. Prompts whose advantages are all 0 stay at 0 under ``exp_reward``.
        ``parity_advantages`` also uses failed samples, unless their prompt has fewer than ``min_group_size`` scores.
        Samples that gates hold back take the lowest advantage of their prompt. Raises :class:`ArtifactError` if a valid
        sample has a reward that is not finite.
        """
        options, prompt_ids = self.options, samples["prompt_id"].to_numpy()
        single = [name for name in samples.columns if name.startswith("reward.")] if options.reward_average else []
        held = np.zeros(len(samples), bool)
        if HELD in samples and len(single) > 1:
            # Each reward's advantages are divided by a deviation of their own before they are averaged, so the sample
            # with the lowest sum of rewards may not have the lowest average.
            held = samples[HELD].to_numpy(bool) & samples["valid"].to_numpy(bool)
        by_reward = [
            group_advantages(
                np.where(held, np.nan, rewards_of(self._scored(samples, column), column)),
                prompt_ids,
                min_group_size=options.min_group_size,
                global_std=options.global_std or options.mixing == "gdpo",
                ddof=1,
                fill=options.parity_advantages,
            )
            for column in single or ["reward"]
        ]
        advantages = np.mean(by_reward, axis=0)
        if held.any():
            advantages = at_lowest(advantages, prompt_ids, held)
        if options.exp_reward:
            transformed = _told_apart(advantages, prompt_ids) | options.parity_advantages
            advantages = np.where(transformed, -np.exp(-advantages), advantages)
        advantages = np.clip(advantages, options.adv_clip_min, options.adv_clip_max)
        return samples.assign(advantage=advantages, used=~np.isnan(advantages))

    def _scored(self, samples: pd.DataFrame, column: str) -> pd.DataFrame:
        """Return ``samples``; with ``parity_advantages``, mark all samples valid that have a score in ``column``."""
        return samples.assign(valid=samples[column].notna()) if self.options.parity_advantages else samples

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch | Transitions) -> Loss:
        """Return the loss times ``loss_scale``, float32 ``[B]``.

        Transitions: ``policy_weight`` times the policy loss plus ``kl_beta`` times the distance to the reference. A
        :class:`Batch` of media: ``data_beta`` times the diffusion loss. At the weights that made the rollout the policy
        loss is minus the advantage: only its gradient counts.

        Metrics are without weights. Transitions have, in float64, ``policy_loss``, ``ratio``, ``clipped`` (1 if the
        clip leaves no gradient) and ``approx_kl`` in the unit of ``ratio_mode``; ``log_ratio`` in nats and
        ``log_ratio_per_dim`` in nats a dimension, whatever the mode; ``logp_drift``, the difference of recorded and
        recomputed log-density in nats a dimension, and ``ratio_drift``, the same in the unit of ``ratio_mode``;
        ``kl`` if ``kl_beta`` > 0. Media have ``data_loss``.
        """
        return self._data_loss(velocity, batch) if isinstance(batch, Batch) else self._policy_loss(velocity, batch)

    def _data_loss(self, velocity: Callable[[str], Tensor], batch: Batch) -> Loss:
        """Return the squared error of the velocity, weighted by ``t^2 + (1 - t)^2``, ``[B]``.

        It equals EDM's weight ``(1 + sigma^2) / sigma^2`` of the error of x_0, at ``sigma = t / (1 - t)`` and data of
        deviation 1. Source: EDM, arXiv:2206.00364, table 1.
        """
        error = velocity(CURRENT) - (batch.noise - batch.x_0)
        per_sample = (batch.t.square() + (1 - batch.t).square()) * batch.mean(error.square())
        scaled = self.options.loss_scale * self.options.data_beta * per_sample
        return Loss(scaled.float(), {"data_loss": per_sample.detach()})

    def _policy_loss(self, velocity: Callable[[str], Tensor], batch: Transitions) -> Loss:
        options = self.options
        behaviour = _mean_of(batch, velocity(BEHAVIOUR).detach())
        reference = _mean_of(batch, velocity(REFERENCE).detach()) if options.kl_beta > 0 else None
        current = _mean_of(batch, velocity(CURRENT))

        num_dims = num_generated(batch.x, batch.mask)
        unit = {"mean_logp": 1.0, "sum_logp": num_dims, "unnormalised": 2 * batch.at.std.square()}[options.ratio_mode]
        per_dim = self._log_ratio(batch, current, behaviour)
        log_ratio = per_dim * unit
        logp_drift = (batch.log_prob - _log_prob(batch, behaviour)).abs()
        policy, clipped = _clipped(log_ratio, batch.advantages.double(), options.clip_ratio)
        metrics = {
            "policy_loss": policy,
            "log_ratio": per_dim * num_dims,
            "log_ratio_per_dim": per_dim,
            "ratio": log_ratio.exp(),
            "clipped": clipped,
            # ratio - 1 - ln ratio, in a form that keeps its digits at ratios near 1.
            "approx_kl": log_ratio.expm1() - log_ratio,
            "logp_drift": logp_drift,
            "ratio_drift": logp_drift * unit,
        }
        loss = options.policy_weight * policy
        if reference is not None:
            metrics["kl"] = self._kl(batch, current, reference)
            loss = loss + options.kl_beta * metrics["kl"]
        return Loss((options.loss_scale * loss).float(), {name: value.detach() for name, value in metrics.items()})

    def _log_ratio(self, batch: Transitions, current: Tensor, behaviour: Tensor) -> Tensor:
        """Return the log-density of ``x_next`` by ``current`` minus ``behaviour``, in nats a dimension: ``[B]``."""
        if self.options.logp_old == "stored":
            return _log_prob(batch, current) - batch.log_prob
        # A difference of squares as a product: equal means give exactly 0, and means that are close keep their digits.
        nearer = generated_mean((current - behaviour) * (2 * batch.x_next.double() - current - behaviour), batch.mask)
        return nearer / (2 * batch.at.std.square())

    def _kl(self, batch: Transitions, current: Tensor, reference: Tensor) -> Tensor:
        """Return the squared distance of two means per dimension, in the unit of ``kl_mode``: float64 ``[B]``.

        FlowGRPO divides the distance by the variance of the noise per unit of time, not by the variance of the step.
        """
        square, mode = generated_mean((current - reference).square(), batch.mask), self.options.kl_mode
        if mode == "unnormalised":
            return square
        return square / (2 * (batch.at.std if mode == "exact" else batch.at.diffusion).square())


def _told_apart(advantages: np.ndarray, prompt_ids: np.ndarray) -> np.ndarray:
    """Return ``[N]`` bool: whether any sample of the same prompt has an advantage other than 0."""
    _, group_of = np.unique(prompt_ids, return_inverse=True)
    return (np.bincount(group_of, weights=np.nan_to_num(advantages) != 0) > 0)[group_of]


def _clipped(log_ratio: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return ``max(-A ratio, -A clip(ratio, 1 - clip, 1 + clip))``, and 1 if the clip leaves no gradient.

    Both are float64 ``[B]``. Source: PPO, arXiv:1707.06347, equation 7, with the sign of a loss.
    """
    # Bounded before the exponential, so that a ratio beyond float64 is clipped like any other instead of giving NaN.
    above, below = log_ratio.clamp(max=math.log1p(clip)), log_ratio.clamp(min=math.log1p(-clip))
    bounded = above.where(advantages >= 0, below)
    return -advantages * bounded.exp(), ((bounded != log_ratio) & (advantages != 0)).double()


def _mean_of(batch: Transitions, velocity: Tensor) -> Tensor:
    return mean(batch.x, velocity, batch.history, batch.at)


def _log_prob(batch: Transitions, mean: Tensor) -> Tensor:
    return log_prob(square_error(batch.x_next, mean, batch.mask), batch.at.std)
