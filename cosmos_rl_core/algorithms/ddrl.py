"""DDRL: policy gradients on the sampler's steps, held near the data by the diffusion loss. arXiv:2512.04332."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cosmos_rl_core.algorithms._policy_gradient import Algorithm, PolicyGradientOptions

__all__ = ["Algorithm", "Options"]


class Options(PolicyGradientOptions):
    """DDRL. Names are cosmos-rl's; :class:`PolicyGradientOptions` lists the settings of cosmos-rl's arithmetic.

    The paper's transformation of rewards is ``exp_reward``, off by default like in cosmos-rl's recipes.
    """

    type: Literal["ddrl"]  # pyright: ignore[reportIncompatibleVariableOverride]
    train_on: tuple[int, ...] = (0, 2, 4, 6, 8, 10, 12, 14, 16, 18)
    """Steps of the sampler to train on, from 0; -1 is a random other step, drawn for every prompt."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight of the distance to the reference; 0 saves its forward pass."""
    data_beta: float = Field(default=0.01, ge=0)
    """Weight of the diffusion loss on the dataset's media; 0 needs no media."""
