"""The noise levels of a rollout, from the pipeline's own scheduler."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from cosmos_rl_core.errors import ConfigError

_ROUNDING = 1e-6
"""Largest excess of a first level of 1: schedulers compute in float32."""


@dataclass(frozen=True)
class Schedule:
    """A falling grid of noise levels in [0, 1] that ends at 0. Raises :class:`ConfigError` for other levels."""

    sigmas: tuple[float, ...]
    """``num_steps + 1`` levels."""

    def __post_init__(self) -> None:
        falls = all(here > there for here, there in pairwise(self.sigmas))
        if len(self.sigmas) < 2 or not falls or self.sigmas[0] > 1 or self.sigmas[-1] != 0:
            found = ", ".join(f"{sigma:.4g}" for sigma in self.sigmas[:12])
            raise ConfigError(f"expected noise levels falling from at most 1 to exactly 0, found {found}")

    @property
    def num_steps(self) -> int:
        """Return the number of solver steps."""
        return len(self.sigmas) - 1


def schedule_of(
    scheduler: Any,
    num_steps: int,
    *,
    shift: float | None = None,
    always_shifts: bool = False,
    sigmas: np.ndarray | list[float] | None = None,
) -> Schedule:
    """Return the grid of ``num_steps`` steps of a diffusers flow scheduler, in float64; the scheduler does not change.

    A scheduler that shifts its levels by the size of the image needs ``shift``, the ``mu`` that the stock pipeline
    gives it for that size. ``sigmas``, one per step, are levels that the stock pipeline gives it, which it may
    shift. Raises :class:`ConfigError` like :func:`check_flow`, and unless the grid has one level per step and a final 0
    (Heun repeats levels; a grid may be inverted).
    """
    name = type(scheduler).__name__
    check_flow(name, scheduler.config, by_size=shift is not None, always=always_shifts, given=sigmas)
    own = type(scheduler).from_config(scheduler.config)
    given: dict[str, Any] = {"num_inference_steps": num_steps} if sigmas is None else {"sigmas": sigmas}
    if shift is not None and scheduler.config.get("use_dynamic_shifting"):
        given["mu"] = shift
    own.set_timesteps(**given)
    levels = tuple(1.0 if 1 < sigma < 1 + _ROUNDING else sigma for sigma in map(float, own.sigmas))
    if len(levels) != num_steps + 1:
        raise ConfigError(f"{name} lays out {len(levels)} levels for {num_steps} steps; expected {num_steps + 1}")
    try:
        return Schedule(levels)
    except ConfigError as error:
        raise ConfigError(f"the pipeline's own {name}: {error}") from error


def check_flow(
    name: str,
    settings: Mapping[str, Any],
    *,
    by_size: bool = False,
    always: bool = False,
    given: np.ndarray | list[float] | None = None,
) -> None:
    """Raise :class:`ConfigError` unless a scheduler of the class ``name`` has the levels of a flow in this pipeline.

    ``by_size``: the stock pipeline gives its scheduler a shift by the size of the image. ``always``: also to schedulers
    that do not shift. ``given``: noise levels that it gives its scheduler. Torch-free, so that plans can check.
    """
    is_dpm, shifts = name == "DPMSolverMultistepScheduler", settings.get("use_dynamic_shifting")
    others = [f"{key} = {value!r}" for key, value in _OTHER_LEVELS.get(name, ()) if settings.get(key) == value]
    if always and is_dpm and not shifts:
        why = "needs use_dynamic_shifting = true: the stock pipeline of this model gives it a shift"
    elif given is not None and is_dpm:
        why = "takes no noise levels, and the stock pipeline of this model gives it some"
    elif isinstance(given, list) and name == "UniPCMultistepScheduler":
        why = "takes no list of noise levels, and the stock pipeline of this model gives it one"
    elif not name.startswith("FlowMatch") and not settings.get("use_flow_sigmas"):
        why = "is not a flow scheduler; expected FlowMatchEulerDiscreteScheduler, or one with use_flow_sigmas = true"
    elif (prediction := settings.get("prediction_type", "flow_prediction")) != "flow_prediction":
        why = f"has prediction_type = {prediction!r}; a flow needs 'flow_prediction'"
    elif name == "FlowMatchHeunDiscreteScheduler":
        why = "lays out each level twice; expected one level a step"
    elif others:
        why = f"has {', '.join(others)}, with which its levels do not fall within [0, 1] to exactly 0"
    elif shifts and not by_size:
        why = "has use_dynamic_shifting = true; the stock pipeline gives it no size to shift by, so it must be off"
    elif shifts and is_dpm and (kind := settings.get("time_shift_type", "exponential")) != "exponential":
        why = f"shifts by size only exponentially; found time_shift_type = {kind!r}"
    else:
        return
    raise ConfigError(f"{name} {why}")


_SIGMA_MIN = ("final_sigmas_type", "sigma_min")
_OTHER_LEVELS = {
    "FlowMatchEulerDiscreteScheduler": (("invert_sigmas", True),),
    # These settings make levels of a diffusion, even with use_flow_sigmas.
    "DPMSolverMultistepScheduler": (
        *((f"use_{kind}", True) for kind in ("karras_sigmas", "exponential_sigmas", "beta_sigmas", "lu_lambdas")),
        _SIGMA_MIN,
    ),
    "UniPCMultistepScheduler": (_SIGMA_MIN,),
}
"""Settings of a scheduler's class, with the value that makes its levels differ from a flow's, or end above 0."""
