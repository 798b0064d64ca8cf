"""The policy parts, rollouts and schedules that an algorithm needs: a value that plans read without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT, OLD, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cosmos_rl_core.config.policy import SolverConfig

DRIFT_METRICS = ("log_ratio", "log_ratio_per_dim", "ratio", "clipped", "approx_kl", "logp_drift", "ratio_drift")
"""Metrics that a loss on transitions returns: the columns of the update's ``transitions.parquet``."""


@dataclass(frozen=True)
class DataTerm:
    """Media of the dataset for a second loss, added to the loss on recorded steps."""

    on_first_only: bool
    """Add the loss on media at the first trained step of a sample only, instead of at every trained step."""
    as_rollout: bool
    """Noise media with the noise level of the trained step and the initial noise of its rollout, instead of drawing
    both."""
    text_dropout: float
    """Share of the media, 0 to 1, whose prompt is replaced by the empty one."""
    given_frames: tuple[int, int] = (0, 0)
    """Fewest and most latent frames at the start of an item that the model is given and the loss leaves out."""


def every_pair(size: int) -> int:
    """Return the number of pairs among ``size`` samples."""
    return size * (size - 1) // 2


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The policy parts, rollouts and schedules that an algorithm needs. The defaults fit supervised training.

    A policy has these parts: ``current``, the weights in training; ``old``, a slow copy of them (see ``old_decay``);
    ``reference``, the base model or an earlier policy (see ``update_ref_every_iter``). In a loss ``behaviour`` is the
    weights that made the rollouts, whichever part that was then.
    """

    behaviour: str = CURRENT
    """Policy part that generates rollouts: ``current``, ``old`` or ``reference``."""
    roles: tuple[str, ...] = (CURRENT,)
    """Policy parts that the loss reads, out of ``current``, ``behaviour``, ``old`` and ``reference``. Each costs a
    forward pass."""
    train_on: tuple[int, ...] = ()
    """Sampler steps, from 0, that rollouts record and the loss gets as ``Transitions``; -1 is a random step (see
    ``trained_steps``). Empty: the loss gets final latents as ``Batch``, noised anew."""
    steps_of: Callable[[int], tuple[int, ...]] | None = None
    """Function from a 0-based iteration to its recorded steps. They replace ``train_on`` and must be as many. None:
    ``train_on`` in all iterations."""
    timesteps_fraction: float = 1.0
    """Share of the sampler's noise levels, 0 to 1, that each sample is trained at, rounded down. Unused with
    ``train_on``."""
    unit: Literal["sample", "pair"] = "sample"
    """The unit that no micro-batch, no rank and no optimizer step divides. ``pair``: two samples of a rollout at the
    same noise level, with the same noise; ``advantages`` then also returns the column ``beats``. Not with
    ``train_on``."""
    most_pairs: Callable[[int], int] = every_pair
    """Function from the number of samples of a prompt to its largest number of pairs. Unused unless ``unit`` is
    ``pair``."""
    given_pairs: int = 0
    """Number of pairs that a file gives, 0 if rewards make the pairs. The update counts pairs that are not in its
    rollout."""
    off_policy: bool = False
    """Whether the loss also trains on rollouts of another run. ``behaviour`` is then a policy other than the trained
    one, or one that did not make the rollouts. Without effect unless the loss reads ``behaviour``."""
    trains_unconditional: bool = True
    """Under guidance, send the gradient through the unconditional prediction too."""
    diffusion: bool = False
    """The loss reads the diffusion coefficient of recorded steps, which some samplers do not have."""
    max_logp_drift: float | None = None
    """Largest ``ratio_drift``. If set, the loss must return all ``DRIFT_METRICS``. Beyond it the update fails, because
    it does not reproduce the recorded densities. Needs ``train_on``."""
    max_drift: float | None = None
    """Largest mean ``approx_kl`` of an optimizer step. Beyond it the pass over the rollout stops; None means never.
    Needs ``max_logp_drift``."""
    data_term: DataTerm | None = None
    """Media of the dataset that the loss gets too, as ``Batch``. Needs ``train_on``."""
    use_same_seed: bool = False
    """Start all samples of a prompt from the same noise."""
    old_decay: Callable[[int], float] | None = None
    """Decay d of ``old <- d old + (1 - d) current`` after a 0-based iteration; None: there is no part ``old``."""
    update_ref_every_iter: int = 0
    """Iterations after which the reference becomes a copy of the current policy. 0 keeps the base model."""

    def mistakes(self) -> list[str]:
        """Return a sentence for each need that no policy, rollout or schedule can meet, or that contradicts another."""
        known = (CURRENT, BEHAVIOUR, OLD, REFERENCE)
        found = [f"roles: found {role!r}, expected of {known}" for role in self.roles if role not in known]
        if self.behaviour not in (CURRENT, OLD, REFERENCE):
            found.append(f"behaviour = {self.behaviour!r}: expected one of {(CURRENT, OLD, REFERENCE)}")
        if CURRENT not in self.roles:
            found.append(f"roles = {self.roles}: without {CURRENT!r} nothing is trained")
        if OLD in (*self.roles, self.behaviour) and self.old_decay is None:
            found.append(f"{OLD!r} is read, and old_decay = None says that there is no such part; give it a function")
        if not 0 < self.timesteps_fraction <= 1:
            found.append(f"timesteps_fraction = {self.timesteps_fraction}: expected above 0 and at most 1")
        if self.max_logp_drift is not None and not self.train_on:
            found.append("max_logp_drift limits the drift of recorded steps; set train_on too")
        if self.steps_of is not None and not self.train_on:
            found.append("steps_of chooses recorded steps; set train_on too, to as many steps")
        if self.max_drift is not None and self.max_logp_drift is None:
            found.append("max_drift needs max_logp_drift")
        if self.data_term is not None and not self.train_on:
            found.append("data_term comes with recorded steps; set train_on too")
        if self.update_ref_every_iter < 0:
            found.append(f"update_ref_every_iter = {self.update_ref_every_iter}: expected 0 or more")
        return found

    @property
    def transitions(self) -> bool:
        """Return whether the loss gets recorded sampler steps instead of final latents."""
        return bool(self.train_on)

    def steps_at(self, iteration: int) -> tuple[int, ...]:
        """Return the steps that the rollout of a 0-based iteration records."""
        return self.train_on if self.steps_of is None else self.steps_of(iteration)

    @property
    def members(self) -> int:
        """Return the number of samples of a unit."""
        return 2 if self.unit == "pair" else 1

    def most_units(self, size: int) -> int:
        """Return the largest number of units of a prompt with ``size`` samples."""
        return self.most_pairs(size) if self.unit == "pair" else size

    def num_times(self, num_steps: int) -> int:
        """Return the number of noise levels, or recorded steps, that each sample of ``num_steps`` is trained at.

        Raises :class:`ConfigError` if it is 0.
        """
        if self.train_on:
            return len(self.train_on)
        if count := int(num_steps * self.timesteps_fraction):
            return count
        raise ConfigError(
            f"timesteps_fraction = {self.timesteps_fraction} of num_steps = {num_steps} is less than one noise level; "
            f"raise it to at least 1 / {num_steps}"
        )

    def reference_after(self, iteration: int) -> Literal["base", "kept", "renewed"]:
        """Return the reference after a 0-based iteration: the base model, unchanged, or a copy of ``current``."""
        if (every := self.update_ref_every_iter) == 0:
            return "base"
        return "kept" if (iteration + 1) % every else "renewed"

    def check(self, sample: SolverConfig, iterations: int = 1) -> None:
        """Raise :class:`ConfigError` if the rollouts of the sampler ``sample`` lack an input of the loss."""
        self.num_times(sample.num_steps)
        if self.train_on and self.unit == "pair":
            raise ConfigError(
                "pairs are trained on final latents; recorded sampler steps (train_on) belong to one sample"
            )
        if self.train_on:
            kernel = planned_kernel(sample)
            for steps in {self.steps_at(k): None for k in range(iterations)}:
                if len(steps) != len(self.train_on):
                    raise ConfigError(f"steps_of returned {steps}; expected {len(self.train_on)} steps, as in train_on")
                trained_steps(steps, kernel.trainable)
            if self.diffusion and any(math.isnan(kernel.steps[step].diffusion) for step in kernel.trainable):
                raise ConfigError(
                    f"the loss (kl_mode = 'flow_grpo') reads the diffusion coefficient, which solver = "
                    f"{sample.solver!r} does not have; set solver = 'flow_sde' or kl_mode = 'exact'"
                )
        if not self.trains_unconditional and sample.guidance_scale == 1:
            raise ConfigError(
                "train_unconditional = false leaves out a prediction that guidance_scale = 1 does not make; "
                "set it to true, or raise policy.diffusers.sample.guidance_scale"
            )


def trained_steps(train_on: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    """Return the steps ``train_on``, ascending and each once.

    Each -1 is replaced by the next step of ``order``, a permutation of the sampler's steps with noise, that is not
    listed. Raises :class:`ConfigError` if there is none, and for listed steps that are not in ``order`` or are listed
    twice.
    """
    listed = {step for step in train_on if step != -1}
    unlisted = [step for step in order if step not in listed]
    num_random = train_on.count(-1)
    is_twice = len(listed) + num_random < len(train_on)
    if is_twice or not listed.issubset(order) or num_random > len(unlisted):
        able = ", ".join(map(str, sorted(order))) or "none, this sampler adds no noise"
        raise ConfigError(
            f"train_on = {list(train_on)}: steps that can be trained on are {able}; a -1 is one that is not listed; "
            "list each once"
        )
    return tuple(sorted([*listed, *unlisted[:num_random]]))
