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

_OF_EDM = ("sigma_max", "sigma_min", "s_churn", "s_noise", "s_t_min", "s_t_max", "solver_option")
_READ = {"edm": _OF_EDM, "flow_sde or cps": ("noise_level",)}
"""Settings that only some solvers read, by the names of these."""


def check_settings(config: SolverConfig) -> None:
    """Raise :class:`ConfigError` for settings that a recipe sets although its solver does not read them.

    ``config`` is a recipe's own section. A section that was written out has all its fields set.
    """
    mistakes = [
        f"{', '.join(given)}, which {readers} reads"
        for readers, names in _READ.items()
        if config.solver not in readers.split(" or ")
        and (given := [name for name in names if name in config.model_fields_set])
    ]
    if mistakes:
        raise ConfigError(
            f"policy.diffusers.sample: solver = {config.solver!r} does not read {', nor '.join(mistakes)}; leave out "
            "what it does not read, or choose another solver"
        )


def own_solver(scheduler: str, settings: Mapping[str, Any]) -> Solver:
    """Return the solver with the steps of the scheduler class ``scheduler`` of diffusers and these ``settings``.

    Raises :class:`ConfigError` if there is none for the class.
    """
    if scheduler not in _OWN:
        known = ", ".join(f"{name} ({next(iter(solvers))})" for name, solvers in _OWN.items())
        raise ConfigError(
            f"policy.diffusers.sample.solver is not set, and no solver takes the steps of {scheduler}, which is the "
            f"pipeline's own; known: {known}. Set the solver to sample with instead"
        )
    return _closest(scheduler, settings)[0]


def check_own(solver: Solver, scheduler: str, settings: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` if ``solver`` is that of the pipeline's own scheduler but its steps differ.

    They differ by settings of the scheduler. A recipe may set another solver whatever these settings are.
    """
    if scheduler not in _OWN:
        return
    own, other = _closest(scheduler, settings)
    if own == solver and other:
        expected = {name: _OWN[scheduler][own][name][0] for name in other}
        raise ConfigError(
            f"policy.diffusers.sample: solver = {solver!r}, of the pipeline's own {scheduler}, takes its steps with "
            f"{_settings(expected)}; found {_settings(other)} in scheduler/scheduler_config.json, with which it takes "
            "other steps. Change the file, or set another solver"
        )


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

    Raises :class:`ConfigError` if the solver and its settings do not go together.
    """
    if config.solver is None:
        raise ConfigError("sample.solver is not set, although plans and requests always set it")
    if config.solver == "edm":
        return edm(config)
    if config.solver in _STOCHASTIC:
        return _STOCHASTIC[config.solver](schedule(), config.noise_level)
    return _DETERMINISTIC[config.solver](schedule())


_STOCHASTIC: dict[str, Callable[[Schedule, float], Kernel]] = {"flow_sde": flow_sde, "cps": cps}
_DETERMINISTIC: dict[str, Callable[[Schedule], Kernel]] = {
    "euler": euler,
    "dpm2": dpm2,
    "unipc": unipc,
    "unipc1": partial(unipc, order=1),
    "unipc3": partial(unipc, order=3),
}


def planned_kernel(config: SolverConfig) -> Kernel:
    """Return the sampler on an even grid, for plans: whether a step has noise does not depend on the grid.

    A solver that is not set is the pipeline's own, which has no noise.
    """
    config = config.model_copy(update={"solver": config.solver or "euler"})
    return kernel_of(config, lambda: Schedule((*(1 - i / config.num_steps for i in range(config.num_steps)), 0.0)))
