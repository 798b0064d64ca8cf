"""What an algorithm plugin offers. It works on tensors by their methods and never imports torch when it runs.

That keeps ``Options`` readable by flows. A plugin file has a class ``Options`` (an :class:`AlgorithmOptions`) and a
class ``Algorithm``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.transition import Coefficients, generated_mean, model_input

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd
    from torch import Tensor

    from cosmos_rl_core.config.policy import SolverConfig


@dataclass(frozen=True)
class Batch:
    """A micro-batch at one noise level each; B samples."""

    x_0: Tensor
    """Clean latents ``[B, ...]``, float32."""
    noise: Tensor
    """Standard normal, the shape of ``x_0``."""
    t: Tensor
    """Noise level of each sample ``[B]`` in [0, 1]."""
    advantages: Tensor | None
    """One number a sample ``[B]``; None where the algorithm needs no reward."""
    mask: Tensor | None = None
    """1 at generated dimensions, 0 at given ones, broadcasts to ``x_0``; None where all are generated."""

    @property
    def per_sample(self) -> tuple[int, ...]:
        """Shape that broadcasts a ``[B]`` tensor over the latents."""
        return (-1, *[1] * (self.x_0.ndim - 1))

    @property
    def x_t(self) -> Tensor:
        """Noised latents ``(1 - t) x_0 + t noise``."""
        t = self.t.view(self.per_sample)
        return (1 - t) * self.x_0 + t * self.noise

    def mean(self, values: Tensor) -> Tensor:
        """Mean over each sample's generated dimensions: ``[B, ...] -> [B]``; float64 with a mask."""
        return generated_mean(values, self.mask)


@dataclass(frozen=True)
class Transitions:
    """A micro-batch of recorded sampler steps, one each; B samples. Raises ``ValueError`` at numbers not ``[B]``.

    The sampler drew ``x_next`` from the normal distribution whose mean and deviation ``at`` gives.
    """

    x: Tensor
    """State that the step began at ``[B, ...]``, float32."""
    x_next: Tensor
    """State that it drew, the shape of ``x``."""
    history: Tensor
    """Estimate of x_0 by the step before, the shape of ``x``; zeros where the sampler looks back at nothing."""
    at: Coefficients
    """The sampler's row of each step, ``[B]`` float64."""
    log_prob: Tensor
    """Log-density of ``x_next`` at the rollout ``[B]``: the mean over generated dimensions, nats."""
    advantages: Tensor
    """One number a sample ``[B]``, float32."""
    mask: Tensor | None = None
    """1 at generated dimensions, 0 at given ones, broadcasts to ``x``; None where all are generated."""

    def __post_init__(self) -> None:
        size = self.x.shape[0]
        for name, numbers in {**self.at._asdict(), "log_prob": self.log_prob, "advantages": self.advantages}.items():
            if tuple(numbers.shape) != (size,):
                raise ValueError(f"{name}: needs one number a sample, shape [{size}]; found {list(numbers.shape)}")

    @property
    def x_t(self) -> Tensor:
        """The model's input ``input_scale x``, float32, to the bit that of the rollout."""
        return model_input(self.x, self.at)[0]

    @property
    def t(self) -> Tensor:
        """Noise level that the model is told ``[B]``, float64 in [0, 1]."""
        return self.at.t


def trained_steps(train_on: tuple[int, ...], num_steps: int, order: Sequence[int]) -> tuple[int, ...]:
    """The steps ``train_on`` of a sampler of ``num_steps``, ascending and each once.

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


DRIFT_METRICS = ("log_ratio", "log_ratio_per_dim", "ratio", "clipped", "approx_kl", "logp_drift", "ratio_drift")
"""What the loss says of each transition: the columns of the update's ``transitions.parquet``."""


@dataclass(frozen=True)
class DriftLimits:
    """How far an update may be from the policy that made its rollouts, by two of :data:`DRIFT_METRICS`."""

    max_logp_drift: float
    """Largest ``ratio_drift``; beyond it the update fails, because it does not compute what the rollout did."""
    max_drift: float | None
    """Mean ``approx_kl`` of an optimizer step beyond which the pass over the rollout stops; None means never."""


@dataclass(frozen=True)
class DataTerm:
    """How media are drawn for the loss beside that of each sample's trained steps."""

    on_first_only: bool
    """At the first trained step of a sample only, instead of at every one."""
    as_rollout: bool
    """Noised by the level of the trained step and the initial noise of its rollout; else both are drawn."""
    text_dropout: float
    """Share of the media whose prompt is replaced by the empty one."""
    given_frames: tuple[int, int] = (0, 0)
    """Fewest and most latent frames at the start of an item that are given to the model and left out of the loss."""


@dataclass(frozen=True)
class Loss:
    """Per-sample loss ``[B]`` (float32, or float64 under a mask, with gradient) and numbers worth a curve, each ``[B]``
    and detached."""

    per_sample: Tensor
    metrics: dict[str, Tensor]


class Algorithm(Protocol):
    """Rewards to advantages, a loss, and what happens to the slow copies at the end of an iteration."""

    behaviour: str
    """The policy part that generates rollouts: ``current``, ``old`` or ``reference``."""
    roles: tuple[str, ...]
    """The policy parts that its loss asks for. The part ``behaviour`` is the weights that made the rollouts."""
    transitions: bool
    """Whether it trains on the sampler's recorded steps (:class:`Transitions`) instead of final latents."""
    train_on: tuple[int, ...]
    """The steps to record, for :func:`trained_steps`; empty without ``transitions``."""
    trains_unconditional: bool
    """Whether, under guidance, the gradient goes through the unconditional prediction too."""
    drift_limits: DriftLimits | None
    """For how far its updates may drift; its loss on transitions has :data:`DRIFT_METRICS`. None without them."""
    data_term: DataTerm | None
    """How its loss takes, beside the transitions, a :class:`Batch` of the dataset's media; None if it does not."""
    use_same_seed: bool
    """Whether all samples of a prompt start from the same noise."""

    def check(self, sample: SolverConfig) -> None:
        """Raise :class:`ConfigError` if it cannot train on rollouts of this sampler, or lacks what it trains on."""
        ...

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Advantages of scored samples: in, columns ``sample_id, prompt_id, reward, valid``; out, the same rows with
        ``advantage`` (NaN where the sample is excluded) and ``used``. Never makes up a number for a failed sample,
        unless an option asks for it. May read ``reward.<name>``, the weighted score of each reward, if it is there."""
        ...

    def num_times(self, num_steps: int) -> int:
        """How many noise levels, or recorded steps, of a rollout of ``num_steps`` each sample is trained on."""
        ...

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch | Transitions) -> Loss:
        """``velocity(part)`` is the prediction at ``batch.x_t, batch.t`` of a policy part: ``current`` with gradient,
        every other (``old``, ``behaviour``, ``reference``) without. Call ``current`` last: then no
        other forward pass has to fit beside what it keeps for its backward pass, nor are weights swapped before that
        has gathered them again. Takes only the kinds of batch that ``transitions`` and ``data_term`` announce, and
        counts of each only what its mask says was generated: frames may be given in any."""
        ...

    def reference_after(self, iteration: int) -> Literal["base", "kept", "renewed"]:
        """The reference of the policy after 0-based ``iteration``: the base model, the one it had before, or itself."""
        ...

    def old_decay(self, iteration: int) -> float | None:
        """Decay d of ``old <- d old + (1 - d) current`` after 0-based ``iteration``; None if there is no old copy."""
        ...
