"""FlowGRPO: policy gradients on the sampler's steps, held near a reference policy. arXiv:2505.05470."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cosmos_rl_core.algorithms._policy_gradient import Algorithm, PolicyGradientOptions

__all__ = ["Algorithm", "Options"]


class Options(PolicyGradientOptions):
    """FlowGRPO. Names are cosmos-rl's; :class:`PolicyGradientOptions` lists the settings of each arithmetic.

    cosmos-rl's recipe also has ``update_ref_every_iter = 16`` and ``use_same_seed = true``.
    """

    type: Literal["grpo"]  # pyright: ignore[reportIncompatibleVariableOverride]
    train_on: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)
    """Steps of the sampler to train on, from 0; -1 is a random other step, drawn for every prompt."""
    kl_beta: float = Field(default=0.01, ge=0)
    """Weight of the distance to the reference; 0 saves its forward pass."""
    data_beta: float = Field(default=0.0, ge=0)
    """Weight of the diffusion loss on the dataset's media; 0 needs no media."""
