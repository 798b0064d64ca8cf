"""The sampler that a recipe names."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cosmos_rl_core.config.policy import Solver, SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.edm import edm
from cosmos_rl_core.sampling.flow import cps, dpm2, euler, flow_sde, unipc
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule


def solver_of(chosen: Solver | None, scheduler: str, settings: Mapping[str, Any]) -> Solver:
    """Return the ``chosen`` solver, or the one with the steps of the scheduler class of diffusers and its ``settings``.

    Raises :class:`ConfigError` if none is chosen and the class has none, or if the solver is the scheduler's own but
    the settings make other steps. A recipe may choose another solver whatever these settings are.
    """
    if scheduler not in _OWN:
        if chosen is not None:
            return chosen
        known = ", ".join(f"{name} ({next(iter(solvers))})" for name, solvers in _OWN.items())
        raise ConfigError(
            f"policy.diffusers.sample.solver is not set, and no solver takes the steps of {scheduler}, which is the "
            f"pipeline's own; known: {known}. Set the solver to sample with instead"
        )
    own, other = _closest(scheduler, settings)
    if other and chosen in (None, own):
        expected = {name: _OWN[scheduler][own][name][0] for name in other}
        raise ConfigError(
            f"policy.diffusers.sample: solver = {own!r}, of the pipeline's own {scheduler}, takes its steps with "
            f"{_settings(expected)}; found {_settings(other)} in scheduler/scheduler_config.json, with which it takes "
            "other steps. Change the file, or set another solver"
        )
    return chosen or own


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value, default=str)}" for name, value in values.items())


def _closest(scheduler: str, settings: Mapping[str, Any]) -> tuple[Solver, dict[str, Any]]:
    """Return the solver with the nearest settings, and the settings that make other steps: none for equal steps."""
    # The class's own defaults are the settings of the solver that is listed first.
    defaults = {name: alike[0] for equal in reversed(_OWN[scheduler].values()) for name, alike in equal.items()}
    found = defaults | dict(settings)
    others: dict[Solver, dict[str, Any]] = {
        solver: {name: found[name] for name, alike in equal.items() if found[name] not in alike}
        for solver, equal in _OWN[scheduler].items()
    }
    return min(others.items(), key=lambda pair: len(pair[1]))


_DPM = {"algorithm_type": ("dpmsolver++",), "thresholding": (False,)}
_MIDPOINT = {"solver_type": ("midpoint", "logrho", "bh1", "bh2")}
_UNIPC = {
    # With bh1 the last step, to sigma = 0, is NaN.
    "solver_type": ("bh2", "midpoint", "heun", "logrho"),
    "predict_x0": (True,),
    "thresholding": (False,),
    "lower_order_final": (True,),
    "disable_corrector": ([],),
    "solver_p": (None,),
}

_OWN: dict[str, dict[Solver, dict[str, tuple[Any, ...]]]] = {
    "FlowMatchEulerDiscreteScheduler": {"euler": {"stochastic_sampling": (False,)}},
    # euler_at_final and lower_order_final change nothing: the last step, to sigma = 0, is always first order.
    "DPMSolverMultistepScheduler": {
        "dpm2": {"solver_order": (2,)} | _MIDPOINT | _DPM,
        "euler": {"solver_order": (1,)} | _DPM,
    },
    "UniPCMultistepScheduler": {
        "unipc": {"solver_order": (2,)} | _UNIPC,
        "unipc1": {"solver_order": (1,)} | _UNIPC,
        "unipc3": {"solver_order": (3,)} | _UNIPC,
    },
}
"""Solvers of a scheduler's class, each with the settings with which their steps are equal. A setting has all values
with the same meaning: the classes read each other's files."""


def kernel_of(config: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps. ``schedule`` returns the grid of the flow solvers; ``edm`` has its own grid.

    A solver that is not set, which only plans may have, is the pipeline's own: it has no noise, like ``euler``.

    Raises :class:`ConfigError` if the solver and its settings do not go together.
    """
    if config.solver == "edm":
        return edm(config)
    if config.solver in _STOCHASTIC:
        return _STOCHASTIC[config.solver](schedule(), config.noise_level)
    return _DETERMINISTIC[config.solver or "euler"](schedule())


_STOCHASTIC: dict[str, Callable[[Schedule, float], Kernel]] = {"flow_sde": flow_sde, "cps": cps}
_DETERMINISTIC: dict[str, Callable[[Schedule], Kernel]] = {
    "euler": euler,
    "dpm2": dpm2,
    "unipc": unipc,
    "unipc1": partial(unipc, order=1),
    "unipc3": partial(unipc, order=3),
}


def planned_kernel(config: SolverConfig) -> Kernel:
    """Return the sampler on an even grid, for plans: whether a step has noise does not depend on the grid."""
    return kernel_of(config, lambda: Schedule((*(1 - i / config.num_steps for i in range(config.num_steps)), 0.0)))
