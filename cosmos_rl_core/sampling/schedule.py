"""The noise levels of a rollout, as the pipeline's own scheduler lays them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

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


def schedule_of(
    scheduler: Any,
    num_steps: int,
    image_tokens: int | None = None,
    *,
    max_shift: float | None = None,
    always_shifts: bool = False,
    sigmas: np.ndarray | None = None,
) -> Schedule:
    """The grid of ``num_steps`` steps of a diffusers flow scheduler, in float64. The scheduler is left as it was.

    One that shifts its levels by the size of the image needs ``image_tokens``, how many the transformer makes of it;
    others do not ask. ``max_shift`` is then what the stock pipeline takes if the scheduler's settings have none.
    ``sigmas``, one a step, are levels that the stock pipeline hands to the scheduler, which may shift them.
    Raises :class:`ConfigError` as :func:`check_flow`, and for a grid that is not one level per step ending at 0 (Heun's
    repeated levels, an inverted grid).
    """
    if num_steps < 1:
        raise ConfigError(f"a rollout needs at least 1 step, found {num_steps}")
    name = type(scheduler).__name__
    check_flow(name, scheduler.config, by_size=image_tokens is not None, always=always_shifts, given=sigmas is not None)
    own = type(scheduler).from_config(scheduler.config)
    given: dict[str, Any] = {"num_inference_steps": num_steps} if sigmas is None else {"sigmas": sigmas}
    if image_tokens is not None and scheduler.config.get("use_dynamic_shifting"):
        given["mu"] = shift(scheduler.config, image_tokens, max_shift)
    own.set_timesteps(**given)
    levels = tuple(_rounded(float(sigma)) for sigma in own.sigmas)
    if len(levels) != num_steps + 1:
        raise ConfigError(f"{name} lays out {len(levels)} levels for {num_steps} steps; expected {num_steps + 1}")
    try:
        return Schedule(levels)
    except ConfigError as error:
        raise ConfigError(f"{name} cannot be used: {error}") from error


def shift(settings: Mapping[str, Any], image_tokens: int, max_shift: float | None = None) -> float:
    """The ``mu`` of a scheduler that shifts by size: linear in tokens, through (base_image_seq_len, base_shift) and
    (max_image_seq_len, max_shift) of its settings.

    A linear shift takes the levels to ``mu s / (1 + (mu - 1) s)``, an exponential one takes ``exp(mu)`` for mu. Source:
    Stable Diffusion 3, arXiv:2403.03206, section 5.3.2; the line and its defaults are the stock pipeline's.
    """
    tokens = settings.get("base_image_seq_len", 256), settings.get("max_image_seq_len", 4096)
    shifts = settings.get("base_shift", 0.5), settings.get("max_shift", 1.16 if max_shift is None else max_shift)
    slope = (shifts[1] - shifts[0]) / (tokens[1] - tokens[0])
    return image_tokens * slope + (shifts[0] - slope * tokens[0])


def check_flow(
    name: str, settings: Mapping[str, Any], *, by_size: bool = False, always: bool = False, given: bool = False
) -> None:
    """Whether a scheduler of the class ``name`` lays out the levels of a flow, told the size of the image at most.

    Raises :class:`ConfigError` for one that does not sample a flow, reads the model's answer as another thing, has
    other levels than those that fall to 0 once each, or shifts them by the size of the image where that is not told
    (``by_size``); and for one that refuses the shift, or the levels, that the stock pipeline hands to every scheduler
    (``always``, ``given``). Torch-free, so that a plan can ask.
    """
    if always and name == "DPMSolverMultistepScheduler" and not settings.get("use_dynamic_shifting"):
        raise ConfigError(
            f"{name} needs use_dynamic_shifting = true: the stock pipeline of this model hands it a shift"
        )
    if given and name == "DPMSolverMultistepScheduler":
        raise ConfigError(f"{name} takes no noise levels, and the stock pipeline of this model hands it some")
    if not name.startswith("FlowMatch") and not settings.get("use_flow_sigmas"):
        expected = "FlowMatchEulerDiscreteScheduler, or one with use_flow_sigmas = true"
        raise ConfigError(f"{name} is not a flow scheduler; expected {expected}")
    if (prediction := settings.get("prediction_type", "flow_prediction")) != "flow_prediction":
        raise ConfigError(f"{name} has prediction_type = {prediction!r}; a flow needs 'flow_prediction'")
    if name == "FlowMatchHeunDiscreteScheduler":
        raise ConfigError(f"{name} lays out each level twice; expected one of a single level a step")
    others = [(setting, value) for setting, value in _OTHER_LEVELS.get(name, ()) if settings.get(setting) == value]
    if others:
        found = ", ".join(f"{setting} = {value!r}" for setting, value in others)
        raise ConfigError(f"{name} has {found}, with which its levels do not fall within [0, 1] to exactly 0")
    if not settings.get("use_dynamic_shifting"):
        return
    if not by_size:
        raise ConfigError(
            f"{name} has use_dynamic_shifting = true, and the stock pipeline does not tell it the size to shift by; "
            "only a static shift is supported for this model"
        )
    if name == "DPMSolverMultistepScheduler" and settings.get("time_shift_type", "exponential") != "exponential":
        raise ConfigError(f"{name} shifts by size exponentially alone; found {settings['time_shift_type']!r}")


_SIGMA_MIN = ("final_sigmas_type", "sigma_min")
_OTHER_LEVELS = {
    "FlowMatchEulerDiscreteScheduler": (("invert_sigmas", True),),
    # It makes these of a diffusion's levels, whatever use_flow_sigmas says.
    "DPMSolverMultistepScheduler": (
        *((f"use_{kind}", True) for kind in ("karras_sigmas", "exponential_sigmas", "beta_sigmas", "lu_lambdas")),
        _SIGMA_MIN,
    ),
    "UniPCMultistepScheduler": (_SIGMA_MIN,),
}
"""Settings of a scheduler's class, each with the value by which its levels are not those of a flow, or end above 0."""


def _rounded(sigma: float) -> float:
    return 1.0 if 1 < sigma < 1 + _ROUNDING else sigma


def _brief(sigmas: tuple[float, ...]) -> str:
    shown = [f"{sigma:.4g}" for sigma in sigmas]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-3:]])
