"""What models state of themselves: shifts of their noise levels."""

from typing import Any

import pytest
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines.spec import linear_shift
from cosmos_rl_core.sampling.schedule import schedule_of
from tests.core.solvers.fields import FLOW

BY_SIZE: dict[str, Any] = {"use_dynamic_shifting": True}


OWN_LINE = {"base_image_seq_len": 16, "max_image_seq_len": 1024, "base_shift": 0.3, "max_shift": 1.7}


@pytest.mark.parametrize("image_tokens", [8, 300, 4096])
@pytest.mark.parametrize(
    "scheduler",
    [
        FlowMatchEulerDiscreteScheduler(**BY_SIZE),
        FlowMatchEulerDiscreteScheduler(time_shift_type="linear", shift_terminal=0.02, **OWN_LINE, **BY_SIZE),
        UniPCMultistepScheduler(**BY_SIZE, **FLOW),
        DPMSolverMultistepScheduler(**BY_SIZE, **FLOW),
    ],
)
def test_a_shift_by_size_is_the_stock_pipelines(scheduler: Any, image_tokens: int):
    # DPM++ and UniPC have no line of their own: the stock pipeline's call has a greater slope than its function
    line: dict[str, Any] = {"max_shift": 1.16}
    line |= {name.replace("image_", ""): scheduler.config[name] for name in OWN_LINE if name in scheduler.config}
    mu = calculate_shift(image_tokens, **line)
    stock = type(scheduler).from_config(scheduler.config)
    stock.set_timesteps(7, mu=mu)
    shift = linear_shift(1.16)(image_tokens, 7, scheduler.config)
    assert schedule_of(scheduler, 7, shift=shift).sigmas == tuple(stock.sigmas.tolist())
    with pytest.raises(ConfigError, match="gives it no size"):
        schedule_of(scheduler, 7)
