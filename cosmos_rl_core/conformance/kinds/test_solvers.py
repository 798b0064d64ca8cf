"""Every solver: its table can be sampled with, and its samples end at the x_0 from which all velocities point."""

import itertools

import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.conformance.kinds.members import file_of
from cosmos_rl_core.sampling import solvers
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import Schedule

STEPS = pytest.mark.parametrize("num_steps", [2, 9])
X_0 = 2.0


def made(solver: str, num_steps: int) -> Kernel:
    """Return the table of a solver on even levels."""
    levels = Schedule((*(1 - i / num_steps for i in range(num_steps)), 0.0))
    return solvers.kernel_of(SolverConfig(solver=solver, num_steps=num_steps), lambda: levels)


@pytest.mark.parametrize("solver", plugins.known("solvers"))
def test_a_solver_names_settings_that_there_are(solver: str):
    unknown = {*solvers.facts(solver).settings} - SolverConfig.model_fields.keys()
    assert not unknown, f"{file_of('solvers', solver)}: SOLVER.settings names {', '.join(sorted(unknown))}"


@pytest.mark.parametrize("solver", plugins.known("solvers"))
@STEPS
def test_the_table_is_the_same_twice_and_its_levels_fall(solver: str, num_steps: int):
    file, found = file_of("solvers", solver), made(solver, num_steps)
    assert found == made(solver, num_steps), f"{file}: kernel returned another table the second time"
    falls = all(high > low for high, low in itertools.pairwise(found.levels))
    assert falls, f"{file}: its noise levels are {found.levels}; expected falling ones"
    noisy = [step.index for step in found.steps if step.std > 0 and step.recall_older]
    assert not noisy, f"{file}: steps {noisy} have noise and recall_older"


@pytest.mark.parametrize("solver", plugins.known("solvers"))
@STEPS
def test_steps_lead_to_the_sample_that_every_velocity_points_away_from(solver: str, num_steps: int):
    """From any noise, if no step has noise; otherwise in the mean, which does not depend on draws."""
    table, zeros = made(solver, num_steps), torch.zeros(3, 5, device="cpu")
    noise = torch.randn(3, 5, device="cpu", generator=torch.Generator(device="cpu").manual_seed(7))
    noise = zeros if table.trainable else noise
    ended = sample(lambda x, t: (x - X_0) / t[:, None], noise, table, draw=lambda index: zeros).latents
    off, file = float((ended - X_0).abs().max()), file_of("solvers", solver)
    assert off < 1e-5, f"{file}: in {num_steps} steps its samples end {off:.3g} off x_0; check keep, push and recall"
