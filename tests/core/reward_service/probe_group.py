"""A scorer that compares the samples of a prompt. A plugin from outside the package."""

from typing import Literal

from cosmos_rl_core.config.reward_facts import Facts
from tests.core.reward_service import probe


class Options(probe.Options):
    """The same as of the probe."""

    facts = Facts(scores={"probe": "mean of all pixels, 0 to 255"}, groupwise=True)
    name: Literal["probe_group"] = "probe_group"  # pyright: ignore[reportIncompatibleVariableOverride]


class Reward(probe.Reward):
    """Score ``probe``."""
