"""Which solver samples like a scheduler of diffusers, and which settings of schedulers none has."""

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of, solver_of
from tests.core.solvers.fields import FLOW, by_diffusers, curved_velocity, noise

EULER, DPM, UNIPC = FlowMatchEulerDiscreteScheduler, DPMSolverMultistepScheduler, UniPCMultistepScheduler
KARRAS: dict[str, Any] = {"use_karras_sigmas": True, "sigma_max": 200.0, "sigma_min": 0.01}
SOLVERS: dict[Any, dict[int, str]] = {
    EULER: {2: "euler"},
    DPM: {1: "euler", 2: "dpm2", 3: "dpm2"},
    UNIPC: {1: "unipc1", 2: "unipc", 3: "unipc3"},
}
"""The nearest solver to a scheduler of an order."""


def both_ways(scheduler_class: Any, settings: dict[str, Any], num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the solver that a plan takes for a scheduler ends, and where the scheduler does."""
    scheduler, x = scheduler_class(**settings, **({} if scheduler_class is EULER else FLOW)), noise(3, 5, 1, 1)
    config = SolverConfig(solver=SOLVERS[scheduler_class][settings.get("solver_order", 2)], num_steps=num_steps)
    ours = sample(curved_velocity, x, kernel_of(config, lambda: schedule_of(scheduler, num_steps))).latents
    return ours, by_diffusers(scheduler, num_steps, x)


def check(scheduler_class: Any, settings: dict[str, Any]) -> None:
    name = scheduler_class.__name__
    solver_of(None, name, settings)


@pytest.mark.parametrize("num_steps", [5, 16])
@pytest.mark.parametrize(
    ("scheduler_class", "settings"),
    [
        (EULER, {"use_karras_sigmas": True}),
        (EULER, {"use_exponential_sigmas": True}),
        (EULER, {"shift": 3.0, "shift_terminal": 0.02}),
        (DPM, {"euler_at_final": True}),
        (DPM, {"lower_order_final": False}),
        (DPM, {"solver_type": "bh2"}),
        (DPM, {"solver_order": 1, "flow_shift": 3.0}),
        (UNIPC, {"solver_type": "midpoint", **KARRAS}),
        (UNIPC, {"flow_shift": 3.0, "shift_terminal": 0.02}),
        *((UNIPC, {"solver_order": order, **grid}) for order in (1, 3) for grid in ({"flow_shift": 3.0}, KARRAS)),
    ],
)
def test_a_plan_takes_the_solver_that_equals_the_pipelines_own_scheduler(
    scheduler_class: Any, settings: dict[str, Any], num_steps: int
):
    check(scheduler_class, settings)
    ours, stock = both_ways(scheduler_class, settings, num_steps)
    assert torch.allclose(ours, stock, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("scheduler_class", "settings", "expected"),
    [
        (EULER, {"stochastic_sampling": True}, "stochastic_sampling = false"),
        (DPM, {"solver_order": 3, "flow_shift": 3.0}, "solver_order = 2"),
        (DPM, {"solver_type": "heun"}, 'solver_type = "midpoint"'),
        (DPM, {"algorithm_type": "sde-dpmsolver++"}, r'algorithm_type = "dpmsolver\+\+"'),
        (DPM, {"thresholding": True}, "thresholding = false"),
        (UNIPC, {"solver_type": "bh1"}, 'solver_type = "bh2"'),
        (UNIPC, {"thresholding": True}, "thresholding = false"),
        (UNIPC, {"lower_order_final": False}, "lower_order_final = true"),
        (UNIPC, {"disable_corrector": [1]}, r"disable_corrector = \[\]"),
    ],
)
def test_settings_by_which_the_scheduler_samples_something_else_are_refused(
    scheduler_class: Any, settings: dict[str, Any], expected: str
):
    name = scheduler_class.__name__
    with pytest.raises(ConfigError, match=f"of the pipeline's own {name}, takes its steps with {expected}; found "):
        check(scheduler_class, settings)
    ours, stock = both_ways(scheduler_class, settings, 5)
    assert not torch.allclose(ours, stock, rtol=0, atol=1e-3)
