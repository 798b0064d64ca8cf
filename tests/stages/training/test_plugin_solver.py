"""A solver from outside, as its page shows it: planned, pinned, sampled with and trained on in processes."""

from pathlib import Path

import pytest

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.outside_plugins import find
from cosmos_rl_core.sampling.flow import euler, flow_sde
from cosmos_rl_core.sampling.schedule import Schedule
from cosmos_rl_core.sampling.solvers import kernel_of, solver_of
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_manifest, input_of
from stages.contracts import METRICS
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.pages import examples, write
from tests.stages.conftest import make
from tests.stages.small_grpo import settings_with


@pytest.fixture
def folder(tmp_path: Path):
    """The file of the page; this process forgets its plugin afterwards."""
    write(tmp_path, examples("solver.md"))
    yield tmp_path
    find([])


def settings(folder: Path, *overrides: str) -> Settings:
    return settings_with(folder / "half_sde.py", "policy.diffusers.sample.solver=half_sde", *overrides)


def test_the_outside_solver_has_noise_in_the_first_half_of_its_steps(folder: Path):
    find([str(folder / "half_sde.py")])
    levels = Schedule((1.0, 0.7, 0.5, 0.2, 0.0))
    made = kernel_of(SolverConfig(solver="half_sde", num_steps=4, noise_level=0.5), lambda: levels)
    assert made.steps == (*flow_sde(levels, 0.5).steps[:2], *euler(levels).steps[2:])


def test_policy_gradients_train_on_the_steps_that_have_noise(folder: Path):
    store = str(folder / "store")
    run = Run(freeze(plan_of(settings(folder)), store), store)
    assert [(pin.kind, pin.name) for pin in run.plan.plugins] == [("solvers", "half_sde")]
    for request in (requests.policy(run), run.prepared.embed):
        make(request, folder)
    rollout = requests.rollout(run, 0)
    assert [pin.name for pin in rollout.plugins] == ["half_sde"]
    make(rollout, folder)
    recorded = current_manifest(rollout)
    assert recorded is not None
    assert recorded.config["train_on"] == [0, 1]
    make(rewards(run, run.slots.iteration(0, "rollout"), 0)[0], folder)
    make(requests.update(run, 0), folder)
    metrics = read_table(Artifact(input_of(run.slots.iteration(0, "update"))), METRICS)
    assert float(metrics["logp_drift"].to_numpy().max()) < 1e-5
    assert (metrics["grad_norm"].to_numpy() > 0).all()


def test_a_step_without_noise_cannot_be_trained_on(folder: Path):
    with pytest.raises(ConfigError, match="train_on"):
        plan_of(settings(folder, "train.train_policy.train_on=[0, 3]"))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("    return 3", "kernel returned int; expected a Kernel"),
        ("    return Kernel((), schedule().sigmas)", "at least one step"),
        ("    return Kernel(euler(schedule()).steps[1:], schedule().sigmas)", "indices [1, 2, 3]; expected 0, 1, ..."),
        ("    return Kernel((Step(0, 0.5, 1, 1), Step(1, 0.9, 1, 1)), ())", "expected falling ones"),
        ("    return Kernel((Step(0, 1.0, float('nan'), 1),), ())", "expected finite ones"),
        ("    return Kernel((Step(0, 1.0, 1, 1, std=1.0, recall_older=(0.5,)),), ())", "has noise and recall_older"),
        ("    raise KeyError('noise')", "KeyError: 'noise'"),
        ("    return Kernel(euler(schedule()).steps, ())", "it has 4 steps and 0 sigmas for num_steps = 4"),
        (
            "    return Kernel(euler(schedule()).steps, (*schedule().sigmas[:-1], 0.1))",
            "its sigmas differ from the schedule",
        ),
    ],
)
def test_the_plan_refuses_a_solver_whose_table_cannot_be_sampled_with(folder: Path, code: str, said: str):
    path = folder / "half_sde.py"
    head = path.read_text(encoding="utf-8").partition("    levels = ")[0]
    head = head.replace("import Kernel,", "import Kernel, Step,", 1)
    path.write_text(f"{head}{code}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        plan_of(settings(folder))
    assert f"solver plugin {path}: " in str(caught.value)
    assert said in str(caught.value)


def test_the_error_for_an_unknown_solver_lists_outside_solvers(folder: Path):
    with pytest.raises(
        ConfigError, match=r"unknown solver 'half_sd'; did you mean 'half_sde'.*known: cps, .*, half_sde"
    ):
        plan_of(settings(folder, "policy.diffusers.sample.solver=half_sd"))


def test_settings_that_an_outside_solver_does_not_read_are_refused(folder: Path):
    path = folder / "half_sde.py"
    text = path.read_text(encoding="utf-8").replace('Solver(settings=("noise_level",))', "Solver()")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        plan_of(settings(folder, "policy.diffusers.sample.noise_level=0.9"))
    assert "solver = 'half_sde' does not read it; cps and flow_sde do" in str(caught.value)


def test_an_outside_solver_may_take_the_steps_of_a_scheduler(folder: Path):
    path = folder / "half_sde.py"
    facts = 'Solver(schedulers={"FlowMatchHeunDiscreteScheduler": {"shift": (1.0,)}})'
    text = path.read_text(encoding="utf-8").replace('Solver(settings=("noise_level",))', facts)
    path.write_text(text, encoding="utf-8")
    find([str(path)])
    assert solver_of(None, "FlowMatchHeunDiscreteScheduler", {}) == "half_sde"
    with pytest.raises(ConfigError, match=r"takes its steps with shift = 1\.0; found shift = 3\.0"):
        solver_of(None, "FlowMatchHeunDiscreteScheduler", {"shift": 3.0})
    assert solver_of(None, "FlowMatchEulerDiscreteScheduler", {}) == "euler"


def test_a_solver_whose_noisy_steps_depend_on_the_levels_is_refused(folder: Path):
    """Plans name the steps that are trained on, on even levels."""
    path = folder / "half_sde.py"
    code = "    found = flow_sde(schedule(), 0.5).steps\n    quiet = euler(schedule()).steps\n"
    code += "    steps = (noisy if noisy.t > 0.6 else still for noisy, still in zip(found, quiet))\n"
    code += "    return Kernel(tuple(steps), schedule().sigmas)\n"
    path.write_text(path.read_text(encoding="utf-8").partition("    levels = ")[0] + code, encoding="utf-8")
    find([str(path)])
    config = SolverConfig(solver="half_sde", num_steps=4)
    assert kernel_of(config, lambda: Schedule((1.0, 0.75, 0.5, 0.25, 0.0))).trainable == (0, 1)
    with pytest.raises(ConfigError, match=r"noise in steps \(0, 1, 2\) here and in \(0, 1\) on even levels"):
        kernel_of(config, lambda: Schedule((1.0, 0.9, 0.8, 0.25, 0.0)))
