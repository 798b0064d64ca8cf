"""The sampler that a recipe names."""

import math
from collections.abc import Callable

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.edm import edm
from cosmos_rl_core.sampling.flow import cps, dpm2, euler, flow_sde, unipc
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.schedule import Schedule

_OF_EDM = ("sigma_max", "sigma_min", "s_churn", "s_noise", "s_t_min", "s_t_max", "solver_option")


def check_settings(config: SolverConfig) -> None:
    """Raise :class:`ConfigError` at settings that a recipe gives although its solver does not read them.

    Asks which fields were set, so it is for a recipe's own section: one that was written out whole has set them all.
    """
    # cosmos-rl's recipes for DiffusionNFT have a noise_level beside euler and dpm2, so it passes there.
    unread, reader = (("noise_level",), "flow_sde or cps") if config.solver == "edm" else (_OF_EDM, "edm")
    if given := [name for name in unread if name in config.model_fields_set]:
        raise ConfigError(
            f"policy.diffusers.sample: solver = {config.solver!r} does not read {', '.join(given)}; leave out what it "
            f"does not read, or choose {reader}"
        )


def kernel_of(config: SolverConfig, schedule: Callable[[], Schedule]) -> Kernel:
    """The table of steps. ``schedule`` gives the grid of the flow solvers; ``edm`` has its own and does not ask.

    Raises :class:`ConfigError` if the solver and its settings do not go together.
    """
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
    return {"euler": euler, "dpm2": dpm2, "unipc": unipc}[config.solver](schedule())


def planned_kernel(config: SolverConfig) -> Kernel:
    """The sampler on an even grid: which of its steps have noise does not depend on the grid, so a plan can tell."""
    return kernel_of(config, lambda: Schedule((*(1 - i / config.num_steps for i in range(config.num_steps)), 0.0)))
