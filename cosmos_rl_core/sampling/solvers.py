"""The sampler that a recipe names."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from cosmos_rl_core.config.policy import Solver, SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.edm import edm
from cosmos_rl_core.sampling.flow import cps, dpm2, euler, flow_sde, unipc
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule

_OF_EDM = ("sigma_max", "sigma_min", "s_churn", "s_noise", "s_t_min", "s_t_max", "solver_option")
_OF_NOISE = ("noise_level",)


def check_settings(config: SolverConfig) -> None:
    """Raise :class:`ConfigError` at settings that a recipe gives although its solver does not read them.

    Asks which fields were set, so it is for a recipe's own section: one that was written out whole has set them all.
    """
    of_solver = {"edm": _OF_EDM, "flow_sde": _OF_NOISE, "cps": _OF_NOISE}
    mistakes = [
        f"{', '.join(given)}, which {readers} reads"
        for names, readers in ((_OF_EDM, "edm"), (_OF_NOISE, "flow_sde or cps"))
        if of_solver.get(str(config.solver)) != names
        and (given := [name for name in names if name in config.model_fields_set])
    ]
    if mistakes:
        raise ConfigError(
            f"policy.diffusers.sample: solver = {config.solver!r} does not read {', nor '.join(mistakes)}; leave out "
            "what it does not read, or choose another solver"
        )


def own_solver(scheduler: str, settings: Mapping[str, Any]) -> Solver:
    """The solver that takes the steps of the scheduler class ``scheduler`` of diffusers with these ``settings``.

    Raises :class:`ConfigError` if there is none for the class.
    """
    if scheduler not in _OWN:
        known = ", ".join(f"{name} ({of_class[0].solver})" for name, of_class in _OWN.items())
        raise ConfigError(
            f"policy.diffusers.sample.solver is not set, and no solver takes the steps of {scheduler}, which the "
            f"pipeline samples by; known: {known}. Name the solver to sample with instead"
        )
    return _closest(scheduler, settings)[0].solver


def check_own(solver: Solver, scheduler: str, settings: Mapping[str, Any]) -> None:
    """Whether ``solver``, if it is the one of the pipeline's own scheduler, takes the same steps as that.

    Raises :class:`ConfigError` for settings of the scheduler by which it takes others. Another solver than its own was
    asked for by name, and has no such settings.
    """
    if scheduler not in _OWN:
        return
    own, other = _closest(scheduler, settings)
    if own.solver == solver and other:
        expected = {name: own.settings[name][0] for name in other}
        raise ConfigError(
            f"policy.diffusers.sample: solver = {solver!r}, of the pipeline's own {scheduler}, takes its steps with "
            f"{_settings(expected)}; found {_settings(other)} in scheduler/scheduler_config.json, by which it samples "
            "something else. Change that there, or name another solver"
        )


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value, default=str)}" for name, value in values.items())


@dataclass(frozen=True)
class _Own:
    """A solver of a scheduler's class, and the settings with which their steps are equal.

    Of each setting all values that mean the same, since the classes read each other's.
    """

    solver: Solver
    settings: Mapping[str, tuple[Any, ...]]


def _closest(scheduler: str, settings: Mapping[str, Any]) -> tuple[_Own, dict[str, Any]]:
    """The solver whose settings are nearest, and those that it takes other steps with: none, if it is the one."""
    of_class = _OWN[scheduler]
    # The class's own: those of the solver that is listed first.
    defaults = {name: alike[0] for own in reversed(of_class) for name, alike in own.settings.items()}
    found = defaults | dict(settings)
    others = [
        {name: found[name] for name, alike in own.settings.items() if found[name] not in alike} for own in of_class
    ]
    return min(zip(of_class, others, strict=True), key=lambda pair: len(pair[1]))


_DPM = {"algorithm_type": ("dpmsolver++",), "thresholding": (False,)}
_MIDPOINT = {"solver_type": ("midpoint", "logrho", "bh1", "bh2")}
_UNIPC = {
    # Its last step by bh1, to sigma = 0, is not a number.
    "solver_type": ("bh2", "midpoint", "heun", "logrho"),
    "predict_x0": (True,),
    "thresholding": (False,),
    "lower_order_final": (True,),
    "disable_corrector": ([],),
    "solver_p": (None,),
}

_OWN: dict[str, tuple[_Own, ...]] = {
    "FlowMatchEulerDiscreteScheduler": (_Own("euler", {"stochastic_sampling": (False,)}),),
    # euler_at_final and lower_order_final change nothing: a last step to sigma = 0 is first order anyway.
    "DPMSolverMultistepScheduler": (
        _Own("dpm2", {"solver_order": (2,)} | _MIDPOINT | _DPM),
        _Own("euler", {"solver_order": (1,)} | _DPM),
    ),
    "UniPCMultistepScheduler": (
        _Own("unipc", {"solver_order": (2,)} | _UNIPC),
        _Own("unipc1", {"solver_order": (1,)} | _UNIPC),
        _Own("unipc3", {"solver_order": (3,)} | _UNIPC),
    ),
}


def kernel_of(config: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """The table of steps. ``schedule`` gives the grid of the flow solvers; ``edm`` has its own and does not ask.

    Raises :class:`ConfigError` if the solver and its settings do not go together.
    """
    if config.solver is None:
        raise ConfigError("sample.solver is not set; plans and requests name it, of recipes that leave it out too")
    if config.solver == "edm":
        return edm(
            config.num_steps,
            sigma_max=config.sigma_max,
            sigma_min=config.sigma_min,
            s_churn=config.s_churn,
            s_noise=config.s_noise,
            s_t_min=config.s_t_min,
            s_t_max=math.inf if config.s_t_max is None else config.s_t_max,
            solver_option=config.solver_option,
        )
    if config.solver in ("flow_sde", "cps"):
        return {"flow_sde": flow_sde, "cps": cps}[config.solver](schedule(), config.noise_level)
    return _DETERMINISTIC[config.solver](schedule())


_DETERMINISTIC: dict[str, Callable[[Schedule], Kernel]] = {
    "euler": euler,
    "dpm2": dpm2,
    "unipc": unipc,
    "unipc1": partial(unipc, order=1),
    "unipc3": partial(unipc, order=3),
}


def planned_kernel(config: SolverConfig) -> Kernel:
    """The sampler on an even grid: which of its steps have noise does not depend on the grid, so a plan can tell.

    A solver that is not named is the pipeline's own, and none of those has noise.
    """
    config = config.model_copy(update={"solver": config.solver or "euler"})
    return kernel_of(config, lambda: Schedule((*(1 - i / config.num_steps for i in range(config.num_steps)), 0.0)))
