"""Supervised fine-tuning: flow matching on the media of a dataset, without rewards. arXiv:2403.03206, equation 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cosmos_rl_core.algorithms._base import Batch, Loss
from cosmos_rl_core.algorithms._needs import Needs
from cosmos_rl_core.config.train import SupervisedOptions
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.weights.parts import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from torch import Tensor


class Options(SupervisedOptions):
    """Supervised fine-tuning."""

    type: Literal["sft"]  # pyright: ignore[reportIncompatibleVariableOverride]


class Algorithm:
    """Regression of the velocity on ``noise - x_0``, with equal weight of all noise levels."""

    needs = Needs()

    def __init__(self, options: Options) -> None:
        self.options = options

    def advantages(self, samples: pd.DataFrame) -> pd.DataFrame:
        """Raise :class:`ConfigError`: there are no rewards."""
        raise ConfigError("sft trains on a dataset's media and has no advantages; leave the rewards out of its recipe")

    def loss(self, velocity: Callable[[str], Tensor], batch: Batch) -> Loss:
        """Return the mean over generated dimensions of ``(noise - x_0 - velocity) ** 2``, ``[B]``."""
        per_sample = batch.mean((batch.noise - batch.x_0 - velocity(CURRENT)).square())
        return Loss(per_sample, {"velocity_error": per_sample.detach()})
