"""Which solver a plan takes: the one that is named, or the one of the pipeline's own scheduler."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import directories
from flows.planning.plan import Plan, Settings, plan_of

SOLVER = "policy.diffusers.sample.solver"
FLOW: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
EULER, DPM, UNIPC = "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"


@pytest.fixture
def plan_with(recipe, tmp_path: Path):
    """The plan of the tiny recipe for a pipeline with such a scheduler, whose settings another class has written."""

    def plan(scheduler: str, settings: dict[str, Any], *overrides: str, **replaced: str) -> Plan:
        folder = tmp_path / "pipeline"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(directories.resolve_path("package:tiny-sd3"), folder, copy_function=os.symlink)
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        written = {
            "model_index.json": index | {"scheduler": ["diffusers", scheduler]},
            "scheduler/scheduler_config.json": {"_class_name": "AnyScheduler"} | settings,
        }
        for name, values in written.items():
            (folder / name).unlink()
            (folder / name).write_text(json.dumps(values), encoding="utf-8")
        path = recipe(("package:tiny-sd3", str(folder)), *replaced.items())
        return plan_of(Settings(path, overrides=overrides))

    return plan


@pytest.mark.parametrize(
    ("scheduler", "settings", "solver"),
    [
        (EULER, {"shift": 3.0}, "euler"),
        (EULER, {"use_dynamic_shifting": True}, "euler"),
        (DPM, FLOW | {"solver_order": 2, "solver_type": "midpoint", "euler_at_final": True}, "dpm2"),
        (UNIPC, FLOW | {"solver_type": "bh2", "disable_corrector": [], "solver_p": None}, "unipc"),
        (DPM, FLOW | {"solver_order": 1}, "euler"),
        (UNIPC, FLOW | {"solver_order": 3}, "unipc3"),
    ],
)
def test_a_recipe_that_names_no_solver_means_the_pipelines_own_and_its_plan_names_it(
    plan_with, scheduler: str, settings: dict[str, Any], solver: str
):
    plan = plan_with(scheduler, settings)
    assert plan.recipe.policy.diffusers.sample.rollout.solver == solver
    named = plan_with(scheduler, settings, f"{SOLVER}={solver}")
    assert (plan.run_id, plan.identity()) == (named.run_id, named.identity())
    other = "dpm2" if solver == "euler" else "euler"
    assert plan_with(scheduler, settings, f"{SOLVER}={other}").recipe.policy.diffusers.sample.solver == other


@pytest.mark.parametrize(
    ("scheduler", "settings", "said"),
    [
        (EULER, {"stochastic_sampling": True}, "'euler', of the pipeline's own .*; found stochastic_sampling = true"),
        (DPM, FLOW | {"use_dynamic_shifting": True, "time_shift_type": "linear"}, "shifts by size only exponentially"),
        (DPM, FLOW | {"solver_order": 3, "solver_type": "heun"},
         "'euler', .* with solver_order = 1; found solver_order = 3 in scheduler/"),
        (DPM, {}, f"{DPM} is not a flow scheduler"),
        (DPM, FLOW | {"use_karras_sigmas": True}, "use_karras_sigmas = True, with which its levels do not fall within"),
        (UNIPC, FLOW | {"predict_x0": False}, "predict_x0 = true; found predict_x0 = false"),
        *((name, FLOW, f"solver is not set, and no solver takes the steps of {name}, which .*; "
                       f"known: {DPM} \\(dpm2\\), {EULER} \\(euler\\), ")
          for name in ("FlowMatchLCMScheduler", "DPMSolverSinglestepScheduler", "DEISMultistepScheduler",
                       "SCMScheduler")),
        ("FlowMatchHeunDiscreteScheduler", FLOW, "lays out each level twice"),
    ],
)  # fmt: skip
def test_a_scheduler_that_no_solver_reproduces_is_a_mistake(
    plan_with, scheduler: str, settings: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=said):
        plan_with(scheduler, settings)


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        (EULER, {"stochastic_sampling": True}),
        (UNIPC, FLOW | {"solver_order": 3, "predict_x0": False}),
        ("FlowMatchLCMScheduler", {}),
    ],
)
def test_a_recipe_that_names_another_solver_samples_by_it(plan_with, scheduler: str, settings: dict[str, Any]):
    plan = plan_with(scheduler, settings, f"{SOLVER}=dpm2")
    assert plan.recipe.policy.diffusers.sample.solver == "dpm2"


def test_policy_gradients_need_a_named_solver_with_noise(plan_with):
    grpo = {'type = "nft"': 'type = "grpo"\ntrain_on = [0]', "timesteps_fraction = 1.0": ""}
    with pytest.raises(ConfigError, match="can be trained on are none, this sampler adds no noise"):
        plan_with(UNIPC, FLOW, **grpo)
    plan_with(UNIPC, FLOW, f"{SOLVER}=flow_sde", **grpo)


def test_training_on_data_makes_no_rollouts_and_accepts_any_flow_scheduler(plan_with):
    sft = {
        'type = "nft"': 'type = "sft"\nsteps_per_iteration = 2',
        "timesteps_fraction = 1.0": "",
        "batch_size_per_optimize = 4": "",
        "n_generation = 4": "",
        "[[rewards]]": '[validation]\ndataset = { name = "ocr", split = "test" }\n[[rewards]]\nrole = "monitor"',
    }
    plan = plan_with("FlowMatchLCMScheduler", {}, 'train.train_policy.dataset={ name = "rendered_text" }', **sft)
    assert plan.recipe.policy.diffusers.sample.solver == "euler"
