"""Settings of the policy: what of a solver has bounds."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_rl_core.config.policy import SolverConfig


@pytest.mark.parametrize(
    "options",
    [{"num_steps": 0}, {"sigma_min": 0.0}, {"s_churn": -1.0}, {"s_noise": math.nan}, {"solver_option": "2mid"}],
)
def test_settings_of_the_edm_sampler_have_bounds(options: dict[str, Any]):
    with pytest.raises(ValidationError, match=next(iter(options))):
        SolverConfig(solver="edm", **options)
