"""The choice of a solver by a recipe or by the pipeline's scheduler, and its checked table of steps."""

import json
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from cosmos_rl_core import plugins
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.facts import Alike, Solver
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule


def solver_of(chosen: str | None, scheduler: str, settings: Mapping[str, Any]) -> str:
    """Return the ``chosen`` solver; without one, the solver that repeats the steps of diffusers' class ``scheduler``.

    Raises :class:`ConfigError` if none is chosen and no solver repeats the class, or if the solver repeats the class
    but the scheduler's ``settings`` lead to other steps. Settings do not matter if a recipe chooses another solver.
    """
    if not _of_scheduler(scheduler):
        if chosen is not None:
            return chosen
        classes = dict.fromkeys(one for name in _here() for one in facts(name).schedulers)
        known = ", ".join(f"{name} ({next(iter(_of_scheduler(name)))})" for name in sorted(classes))
        raise ConfigError(
            f"policy.diffusers.sample.solver is not set, and no solver takes the steps of {scheduler}, which is the "
            f"pipeline's own; known: {known}. Set the solver to sample with instead"
        )
    own, other = _closest(scheduler, settings)
    if other and chosen in (None, own):
        expected = {name: _of_scheduler(scheduler)[own][name][0] for name in other}
        raise ConfigError(
            f"policy.diffusers.sample: solver = {own!r}, of the pipeline's own {scheduler}, takes its steps with "
            f"{_settings(expected)}; found {_settings(other)} in scheduler/scheduler_config.json, with which it takes "
            "other steps. Change the file, or set another solver"
        )
    return chosen or own


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {json.dumps(value, default=str)}" for name, value in values.items())


def _closest(scheduler: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the solver with the nearest settings, and the settings that lead to other steps; empty for equal steps."""
    solvers = _of_scheduler(scheduler)
    # The class's own defaults are the settings of the solver that is listed first.
    defaults = {name: alike[0] for equal in reversed(solvers.values()) for name, alike in equal.items()}
    found = defaults | dict(settings)
    others = {
        solver: {name: found[name] for name, alike in equal.items() if found[name] not in alike}
        for solver, equal in solvers.items()
    }
    return min(others.items(), key=lambda pair: len(pair[1]))


def kernel_of(config: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """Return the table of steps. ``schedule`` returns the grid of the flow solvers; ``edm`` has its own grid.

    Only plans may leave the solver unset: it is then the pipeline's own, which adds no noise, and ``euler`` takes its
    place.

    Raises :class:`ConfigError` if the settings contradict each other, and if a plugin from outside returns no valid
    table of steps.
    """
    name = config.solver or "euler"
    with plugins.errors_of("solvers", name):
        make = plugins.load("solvers", name).kernel
        found = make(config, schedule)
        if name in plugins.loaded("solvers"):
            _check(found)
            _check_levels(found, config, schedule)
            if found.trainable != (planned := make(config, lambda: _even(config.num_steps)).trainable):
                raise ValueError(
                    f"it has noise in steps {found.trainable} here and in {planned} on even levels; which steps have "
                    "noise may depend on the settings alone, because plans name the steps that are trained on"
                )
    return found


def _check_levels(kernel: Kernel, config: SolverConfig, schedule: Callable[[], Schedule]) -> None:
    """Raise ``ValueError`` unless the levels follow from the settings and the schedule, as an audit checks them."""
    if len(kernel.steps) < config.num_steps or len(kernel.sigmas) != config.num_steps + 1:
        raise ValueError(
            f"it has {len(kernel.steps)} steps and {len(kernel.sigmas)} sigmas for num_steps = {config.num_steps}; "
            f"expected at least {config.num_steps} steps and {config.num_steps + 1} sigmas"
        )
    if not own_levels(config.solver) and kernel.sigmas != schedule().sigmas:
        raise ValueError(
            "its sigmas differ from the schedule; pass its sigmas on, or set own_levels and make them from the settings"
        )


def _check(kernel: Any) -> None:
    """Raise ``ValueError`` if the result of a plugin is not a table that can be sampled with."""
    if not isinstance(kernel, Kernel) or not kernel.steps:
        raise ValueError(f"kernel returned {type(kernel).__name__}; expected a Kernel with at least one step")
    if [step.index for step in kernel.steps] != [*range(len(kernel.steps))]:
        raise ValueError(f"its steps have the indices {[step.index for step in kernel.steps]}; expected 0, 1, ...")
    if not all(high > low for high, low in pairwise(kernel.levels)) or not 0 < kernel.levels[0] <= 1:
        raise ValueError(f"its steps are at the noise levels {kernel.levels}; expected falling ones in (0, 1]")
    for step in kernel.steps:
        numbers = (step.keep, step.push, step.input_scale, step.recall, *step.recall_older, step.std)
        if not all(map(math.isfinite, numbers)) or step.std < 0:
            raise ValueError(f"step {step.index} has the coefficients {numbers}; expected finite ones and std >= 0")
        if step.std > 0 and step.recall_older:
            raise ValueError(f"step {step.index} has noise and recall_older; steps with noise are replayed without it")


def own_levels(name: str | None) -> bool:
    """Return whether a solver has noise levels of its own. Raises :class:`ConfigError` if no solver has this name."""
    return name is not None and facts(name).own_levels


def facts(name: str) -> Solver:
    """Return the facts of a solver, its ``SOLVER``. Raises :class:`ConfigError` if no solver has this name."""
    found = plugins.load("solvers", name)
    if not isinstance(found.SOLVER, Solver):
        raise ConfigError(f"solver plugin {found.__file__}: SOLVER is {found.SOLVER!r}; expected a Solver")
    return found.SOLVER


def readers() -> dict[str, tuple[str, ...]]:
    """Return the solvers that read a setting, by the setting, for settings that not all solvers read."""
    found: dict[str, tuple[str, ...]] = {}
    for name in _here():
        for setting in facts(name).settings:
            found[setting] = (*found.get(setting, ()), name)
    return found


def _of_scheduler(scheduler: str) -> dict[str, Alike]:
    """Return the solvers that repeat the steps of a scheduler's class, each with the settings of equal steps.

    Shipped solvers come first, by name, so that the first one has the defaults of the class.
    """
    return {name: facts(name).schedulers[scheduler] for name in _here() if scheduler in facts(name).schedulers}


def _here() -> list[str]:
    """Return the names of shipped solvers, then of imported ones from outside. Imports no other plugin."""
    return [*plugins.own("solvers"), *sorted({*plugins.loaded("solvers")} - {*plugins.own("solvers")})]


def planned_kernel(config: SolverConfig) -> Kernel:
    """Return the sampler on an even grid, for plans: whether a step has noise does not depend on the grid."""
    return kernel_of(config, lambda: _even(config.num_steps))


def _even(num_steps: int) -> Schedule:
    return Schedule((*(1 - i / num_steps for i in range(num_steps)), 0.0))
