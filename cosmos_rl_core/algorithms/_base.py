"""What an algorithm plugin defines: a class ``Options`` (an :class:`AlgorithmOptions`) and a class ``Algorithm``.

A plugin calls methods of tensors and never imports torch when it runs, so flows can read its options and needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.sampling.transition import Coefficients, generated_mean, model_input

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from torch import Tensor

    from cosmos_rl_core.config.train import AlgorithmOptions


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


@dataclass(frozen=True)
class Loss:
    """Per-sample loss ``[B]`` (float32, or float64 under a mask, with gradient) and numbers worth a curve, each ``[B]``
    and detached."""

    per_sample: Tensor
    metrics: dict[str, Tensor]


class Algorithm(Protocol):
    """Turns rewards into advantages and has a loss. ``needs`` says what both read; an instance computes it once."""

    needs: Needs

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of ``samples`` with ``advantage`` (NaN where the sample is excluded) and ``used``.

        ``samples`` has the columns ``sample_id, prompt_id, reward, valid``, and ``reward.<name>``, the weighted score
        of each reward. A failed sample never gets a made-up number, unless an option asks for it.
        """
        ...

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch | Transitions) -> Loss:
        """Return the loss of each sample.

        ``velocity(part)`` is the prediction of a policy part at ``batch.x_t, batch.t``: of ``current`` with gradient,
        of every other part (``old``, ``behaviour``, ``reference``) without. Call ``current`` last: its activations
        then need not fit beside another forward pass, and its weights are not swapped out before the backward pass.
        ``batch`` is of a kind that ``needs.train_on`` and ``needs.data_term`` ask for. The loss counts only the
        dimensions that ``batch.mask`` marks as generated.
        """
        ...


def algorithm_of(options: AlgorithmOptions) -> Algorithm:
    """Return the algorithm with these options. Raises :class:`ConfigError` if a plugin from outside fails."""
    kind = plugins.load("algorithms", options.type)
    with plugins.errors_of("algorithms", options.type):
        algorithm = kind.Algorithm(options)
        if not isinstance(algorithm.needs, Needs):
            raise TypeError(f"Algorithm.needs must be a Needs, found {algorithm.needs!r}")
    return algorithm
