"""What an algorithm needs from the rest of the product: a value that plans read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.weights.parts import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cosmos_rl_core.config.policy import SolverConfig

DRIFT_METRICS = ("log_ratio", "log_ratio_per_dim", "ratio", "clipped", "approx_kl", "logp_drift", "ratio_drift")
"""Metrics that a loss on transitions returns for each of them: the columns of the update's ``transitions.parquet``."""


@dataclass(frozen=True)
class DriftLimits:
    """How far an update may drift from the policy that made its rollouts, by two of :data:`DRIFT_METRICS`."""

    max_logp_drift: float
    """Largest ``ratio_drift``; beyond it the update fails, because it does not recompute what the rollout recorded."""
    max_drift: float | None
    """Mean ``approx_kl`` of an optimizer step beyond which the pass over the rollout stops; None means never."""


@dataclass(frozen=True)
class DataTerm:
    """How media are drawn for a loss on the dataset beside the loss on recorded steps."""

    on_first_only: bool
    """At the first trained step of a sample only, instead of at every one."""
    as_rollout: bool
    """Whether media get the noise level of the trained step and the initial noise of its rollout; else both are
    drawn."""
    text_dropout: float
    """Share of the media whose prompt is replaced by the empty one."""
    given_frames: tuple[int, int] = (0, 0)
    """Fewest and most latent frames at the start of an item that are given to the model and left out of the loss."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Which policy parts, rollouts and schedules an algorithm needs. The defaults are those of supervised training."""

    behaviour: str = CURRENT
    """The policy part that generates rollouts: ``current``, ``old`` or ``reference``."""
    roles: tuple[str, ...] = (CURRENT,)
    """The policy parts that the loss reads. The part ``behaviour`` is the weights that made the rollouts."""
    train_on: tuple[int, ...] = ()
    """Sampler steps that rollouts record and the loss takes as ``Transitions``, -1 for a random one (see
    :func:`trained_steps`). Empty: the loss takes final latents, noised anew."""
    timesteps_fraction: float = 1.0
    """Share of the sampler's noise levels that each sample is trained at, rounded down. Unused with ``train_on``."""
    trains_unconditional: bool = True
    """Whether, under guidance, the gradient flows through the unconditional prediction too."""
    diffusion: bool = False
    """Whether the loss reads the diffusion coefficient of recorded steps, which not every sampler has."""
    drift_limits: DriftLimits | None = None
    """Limits of the drift of an update; the loss then returns :data:`DRIFT_METRICS`. Needs ``train_on``."""
    data_term: DataTerm | None = None
    """How media are drawn for a loss on the dataset, which the loss takes as ``Batch``. Needs ``train_on``."""
    use_same_seed: bool = False
    """Whether all samples of a prompt start from the same noise."""
    old_decay: Callable[[int], float] | None = None
    """Decay d of ``old <- d old + (1 - d) current`` after a 0-based iteration; None if there is no part ``old``."""
    update_ref_every_iter: int = 0
    """Iterations after which the reference becomes a copy of the current policy; 0 keeps the base model."""

    @property
    def transitions(self) -> bool:
        """Whether the loss takes recorded sampler steps instead of final latents."""
        return bool(self.train_on)

    def num_times(self, num_steps: int) -> int:
        """Return at how many noise levels, or recorded steps, of ``num_steps`` each sample is trained.

        Raises :class:`ConfigError` if that is none, or if ``train_on`` lists steps that do not exist.
        """
        if self.train_on:
            return len(trained_steps(self.train_on, num_steps, range(num_steps)))
        if count := int(num_steps * self.timesteps_fraction):
            return count
        raise ConfigError(
            f"timesteps_fraction = {self.timesteps_fraction} of num_steps = {num_steps} is less than one noise level; "
            f"raise it to at least 1 / {num_steps}"
        )

    def reference_after(self, iteration: int) -> Literal["base", "kept", "renewed"]:
        """Return what the reference is after a 0-based iteration: the base model, unchanged, or the current policy."""
        every = self.update_ref_every_iter
        return "base" if every == 0 else "kept" if (iteration + 1) % every else "renewed"

    def check(self, sample: SolverConfig) -> None:
        """Raise :class:`ConfigError` if rollouts of the sampler ``sample`` lack something that the loss reads."""
        self.num_times(sample.num_steps)
        if self.train_on:
            kernel = planned_kernel(sample)
            kernel.check_trainable(step for step in self.train_on if step != -1)
            trained_steps(self.train_on, len(kernel.steps), kernel.trainable)
            if self.diffusion and kernel.steps[0].diffusion is None:
                raise ConfigError(
                    f"kl_mode = 'flow_grpo' reads the diffusion coefficient, which solver = {sample.solver!r} does not "
                    "have; set solver = 'flow_sde' or kl_mode = 'exact'"
                )
        if not self.trains_unconditional and sample.guidance_scale == 1:
            raise ConfigError(
                "train_unconditional = false leaves out a prediction that guidance_scale = 1 does not make; "
                "leave it at true, or raise policy.diffusers.sample.guidance_scale"
            )


def trained_steps(train_on: tuple[int, ...], num_steps: int, order: Sequence[int]) -> tuple[int, ...]:
    """Return the steps ``train_on`` of a sampler of ``num_steps``, ascending and each once.

    A -1 stands for the next step of ``order``, a permutation of all, that is not listed.
    Raises :class:`ConfigError` if there is no such step.
    """
    listed = {step for step in train_on if step >= 0}
    unlisted = [step for step in order if step not in listed]
    num_random = train_on.count(-1)
    if max(listed, default=0) >= num_steps or num_random > len(unlisted):
        raise ConfigError(
            f"train_on = {list(train_on)} needs more than num_steps = {num_steps} steps; "
            f"steps are 0 to {num_steps - 1}, and a -1 is one that is not listed"
        )
    return tuple(sorted([*listed, *unlisted[:num_random]]))
