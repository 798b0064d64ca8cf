"""Supervised fine-tuning: flow matching on the media of a dataset, without rewards. arXiv:2403.03206, equation 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.config.train import SupervisedOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.weights.parts import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from torch import Tensor

    from cosmos_rl_core.config.policy import SolverConfig


class Options(SupervisedOptions):
    """Supervised fine-tuning."""

    type: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]


class Algorithm:
    """Regression of the velocity on ``noise - x_0``, every noise level weighted alike."""

    behaviour = CURRENT
    roles = (CURRENT,)
    transitions = False
    train_on = ()
    trains_unconditional = True
    drift_limits = None
    data_term = None
    use_same_seed = False

    def __init__(self, options: Options) -> None:
        self.options = options

    def check(self, sample: SolverConfig) -> None:
        """It trains on no rollouts."""

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """There are no rewards: always raises :class:`ConfigError`."""
        raise ConfigError("sft trains on a dataset's media and has no advantages; leave the rewards out of its recipe")

    def num_times(self, num_steps: int) -> int:
        """One noise level a sample and optimizer step, whatever the grid."""
        return 1

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch) -> Loss:
        """Mean over generated dimensions of ``(noise - x_0 - velocity) ** 2``, per sample ``[B]``."""
        per_sample = batch.mean((batch.noise - batch.x_0 - velocity(CURRENT)).square())
        return Loss(per_sample, {"velocity_error": per_sample.detach()})

    def reference_after(self, iteration: int) -> Literal["base"]:
        """The base model, for ever."""
        return "base"

    def old_decay(self, iteration: int) -> None:
        """There is no old copy."""
