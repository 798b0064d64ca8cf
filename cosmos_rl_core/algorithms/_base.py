"""The interface of algorithm plugins: a file ``algorithms/<name>.py`` with the classes ``Options`` and ``Algorithm``.

- ``Options`` is a subclass of :class:`cosmos_rl_core.config.train.RewardedOptions`, for training on rewarded rollouts,
  or of :class:`cosmos_rl_core.config.train.SupervisedOptions`, for training on the media of a dataset. Its field
  ``type`` is ``Literal["<name>"]``. It declares the algorithm's settings, each with a bound and a docstring; a recipe
  sets them in ``[train.train_policy]``.
- ``Algorithm`` takes these options and has the members of the protocol :class:`Algorithm`.

A plugin calls methods of tensors and never imports torch, because plans read its options and needs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    """A micro-batch of B samples, each at one noise level.

    With ``needs.unit = "pair"`` rows 2 i and 2 i + 1 are the winner and the loser of a pair, which have the same
    ``noise`` and ``t``. A sample of several pairs, or at several noise levels, has several rows.
    """

    x_0: Tensor
    """Clean latents ``[B, ...]``, float32."""
    noise: Tensor
    """Standard normal, the shape of ``x_0``."""
    t: Tensor
    """Noise level of each sample ``[B]`` in [0, 1]."""
    advantages: Tensor | None
    """Advantage of each sample ``[B]``, float32; 1 and -1 in a pair. None for media of a dataset."""
    mask: Tensor | None = None
    """1 at generated dimensions, 0 at given ones, broadcasts to ``x_0``; None if all are generated."""

    @property
    def per_sample(self) -> tuple[int, ...]:
        """Return the shape that broadcasts a ``[B]`` tensor over the latents."""
        return (-1, *[1] * (self.x_0.ndim - 1))

    @property
    def x_t(self) -> Tensor:
        """Return the model's input, ``(1 - t) x_0 + t noise``, the shape of ``x_0``."""
        t = self.t.view(self.per_sample)
        return (1 - t) * self.x_0 + t * self.noise

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch with ``change`` applied to every tensor."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items()})

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over each sample's generated dimensions: ``[B, ...] -> [B]``; float64 with a mask."""
        return generated_mean(values, self.mask)


@dataclass(frozen=True)
class Transitions:
    """A micro-batch of B samples, each at one recorded sampler step.

    The sampler drew ``x_next`` from a normal distribution. :func:`cosmos_rl_core.sampling.transition.mean` returns its
    mean from ``x``, a velocity, ``history`` and ``at``; its deviation is ``at.std``.
    """

    x: Tensor
    """State before the step ``[B, ...]``, float32."""
    x_next: Tensor
    """State after the step, the shape of ``x``."""
    history: Tensor
    """Estimate of x_0 by the step before, the shape of ``x``; zeros if the step does not use it."""
    at: Coefficients
    """The sampler's coefficients of each step, ``[B]`` float64."""
    log_prob: Tensor
    """Log-density of ``x_next`` at the rollout ``[B]``: mean over generated dimensions, nats."""
    advantages: Tensor
    """Advantage of each sample ``[B]``, float32."""
    mask: Tensor | None = None
    """1 at generated dimensions, 0 at given ones, broadcasts to ``x``; None if all are generated."""

    @property
    def x_t(self) -> Tensor:
        """Return the model's input ``input_scale x``, the shape of ``x``, float32, with the bits of the rollout."""
        return model_input(self.x, self.at)[0]

    @property
    def t(self) -> Tensor:
        """Return the noise level of each sample ``[B]``, float64 in [0, 1]."""
        return self.at.t

    def each(self, change: Callable[[Tensor], Tensor]) -> Transitions:
        """Return transitions with ``change`` applied to every tensor."""
        own = {name: value for name, value in vars(self).items() if name != "at" and value is not None}
        return replace(self, at=self.at.each(change), **{name: change(tensor) for name, tensor in own.items()})


@dataclass(frozen=True)
class Loss:
    """The result of an algorithm's loss on a micro-batch."""

    per_sample: Tensor
    """Loss of each sample ``[B]``, float32 (or float64 under a mask), with gradient."""
    metrics: dict[str, Tensor]
    """Numbers to record as curves, by name, each ``[B]`` and detached."""


class Algorithm(Protocol):
    """An algorithm: advantages from rewards, and a loss. Every rank makes one from the recipe's ``Options``.

    The trainer draws batches, makes predictions, averages the losses of all samples and steps the optimizer. An
    algorithm keeps no state between calls: everything that lasts is a part of the policy, which ``needs`` declares.
    """

    needs: Needs
    """The policy parts, rollouts and schedules that it needs, from its options alone."""

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Return ``samples`` with the columns ``advantage`` (float64, NaN if excluded) and ``used`` (bool).

        ``samples`` has a row for each sample of one rollout, with the columns ``sample_id``, ``prompt_id``, ``reward``
        (the weighted sum of all rewards), ``valid`` (whether all rewards scored it), and ``reward.<name>``, the
        weighted score of each reward. Exclude samples that are not valid: they have no reward.

        With ``needs.unit = "pair"`` there are two more columns: ``beats``, the ids of the samples that this sample is
        preferred to, separated by spaces, where each id is a pair; and ``dropped``, the number of pairs that this
        sample would have won but that were left out. ``used`` is True for the samples of pairs, and no others.
        """
        ...

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch | Transitions) -> Loss:
        """Return the loss of each sample.

        ``velocity(part)`` returns the prediction of a policy part at ``batch.x_t, batch.t``, the shape of ``x_t``: of
        ``current`` with gradient, of every other part in ``needs.roles`` without. Call ``current`` last: other forward
        passes then need no memory on top of its activations, and its weights stay in place for the backward pass.

        ``batch`` is :class:`Transitions` if ``needs.train_on`` lists steps, else :class:`Batch`. With
        ``needs.data_term`` the loss also gets a :class:`Batch` of media without advantages. Average over the
        dimensions that ``batch.mask`` marks as generated, and no others (``batch.mean``).
        """
        ...


def algorithm_of(options: AlgorithmOptions) -> Algorithm:
    """Return the algorithm with these options. Raises :class:`ConfigError` if a plugin from outside fails."""
    kind = plugins.load("algorithms", options.type)
    with plugins.errors_of("algorithms", options.type):
        algorithm = kind.Algorithm(options)
        if not isinstance(algorithm.needs, Needs):
            raise TypeError(f"Algorithm.needs must be a Needs, found {algorithm.needs!r}")
        if wrong := algorithm.needs.mistakes():
            raise ValueError(f"Algorithm.needs: {'; '.join(wrong)}")
        wanted = ("loss", "advantages") if options.rewarded else ("loss",)
        if missing := [name for name in wanted if not callable(getattr(algorithm, name, None))]:
            raise TypeError(f"Algorithm has no method {' and no '.join(missing)}")
    return algorithm
