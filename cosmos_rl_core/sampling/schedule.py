"""The noise levels of a rollout, as the pipeline's own scheduler lays them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cosmos_rl_core.errors import ConfigError

_ROUNDING = 1e-6
"""Schedulers compute in float32: a first level of 1 can come out this much above 1."""


@dataclass(frozen=True)
class Schedule:
    """A falling grid of noise levels in [0, 1]; the last one is 0.

    Raises :class:`ConfigError` if the levels do not fall, leave [0, 1] or do not end at 0.
    """

    sigmas: tuple[float, ...]
    """``num_steps + 1`` levels."""

    def __post_init__(self) -> None:
        falls = all(here > there for here, there in pairwise(self.sigmas))
        if len(self.sigmas) < 2 or not falls or self.sigmas[0] > 1 or self.sigmas[-1] != 0:
            raise ConfigError(f"expected noise levels falling from at most 1 to exactly 0, found {_brief(self.sigmas)}")

    @property
    def num_steps(self) -> int:
        """How many solver steps the grid has."""
        return len(self.sigmas) - 1


def schedule_of(scheduler: Any, num_steps: int) -> Schedule:
    """The grid of ``num_steps`` steps of a diffusers flow scheduler, in float64. The scheduler is left as it was.

    Raises :class:`ConfigError` as :func:`check_flow`, and for a grid that is not one level per step ending at 0 (Heun's
    repeated levels, an inverted grid).
    """
    if num_steps < 1:
        raise ConfigError(f"a rollout needs at least 1 step, found {num_steps}")
    name = type(scheduler).__name__
    check_flow(name, scheduler.config)
    own = type(scheduler).from_config(scheduler.config)
    own.set_timesteps(num_steps)
    sigmas = tuple(_rounded(float(sigma)) for sigma in own.sigmas)
    if len(sigmas) != num_steps + 1:
        raise ConfigError(f"{name} lays out {len(sigmas)} levels for {num_steps} steps; expected {num_steps + 1}")
    try:
        return Schedule(sigmas)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be used: {error}") from error


def check_flow(name: str, settings: Mapping[str, Any]) -> None:
    """Whether a scheduler of the class ``name`` lays out the levels of a flow, by itself.

    Raises :class:`ConfigError` for one that does not sample a flow, reads the model's answer as another thing, or
    shifts its levels by the size of the image. Torch-free, so that a plan can ask.
    """
    if not name.startswith("FlowMatch") and not settings.get("use_flow_sigmas"):
        expected = "FlowMatchEulerDiscreteScheduler, or one with use_flow_sigmas = true"
        raise ConfigError(f"{name} is not a flow scheduler; expected {expected}")
    if (prediction := settings.get("prediction_type", "flow_prediction")) != "flow_prediction":
        raise ConfigError(f"{name} has prediction_type = {prediction!r}; a flow needs 'flow_prediction'")
    if settings.get("use_dynamic_shifting"):
        raise ConfigError(f"{name} has use_dynamic_shifting = true; only a static shift is supported")


def _rounded(sigma: float) -> float:
    return 1.0 if 1 < sigma < 1 + _ROUNDING else sigma


def _brief(sigmas: tuple[float, ...]) -> str:
    shown = [f"{sigma:.4g}" for sigma in sigmas]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-3:]])
