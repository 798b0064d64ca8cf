"""The recipes of configs/vlm_sft: as written, and planned as deployed on a tiny model of the same class."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file

from cosmos_rl_core.config.vlm.recipe import VLM_SFT, checked
from cosmos_rl_core.conformance.kinds import hf_folder
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.recipes.reading import read_values
from cosmos_rl_core.vlms._base import processor_of
from flows.devices import fitting
from flows.devices.devices import need_of
from flows.operations.pools import GPUS
from flows.planning.plan import Settings, plan_of
from flows.planning.run import run_of
from flows.post_train import post_train
from flows.vlm.kind import KIND
from flows.vlm.plan import VlmPlan
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.test_rules import ROOT, VLM_RECIPES
from tests.twins.shrinking import profiled

ROWS = 300
FRAME = 32 * 32
"""Pixels of a token of Cosmos-Reason2."""
by_name = pytest.mark.parametrize("path", VLM_RECIPES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> dict[str, str]:
    """A tiny model, and conversations in both formats."""
    folder = tmp_path_factory.mktemp("vlm")
    save_file({"one": np.zeros(1, dtype=np.float32)}, folder / "model.safetensors")
    rows = [{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]}] * ROWS
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    hf_folder.save(folder / "chats", {"conversations": pa.array([json.dumps(messages)] * ROWS)}, {})
    (folder / "media").mkdir()
    names = {"media_path": "media", "annotation_path": "rows.json", "path": "chats"}
    return {"model": tiny.save(folder, QWEN3)} | {key: str(folder / name) for key, name in names.items()}


def on_this_machine(path: Path, here: dict[str, str]) -> tuple[str, ...]:
    """What a tiny machine changes: where the model and the data are. No setting that is the recipe's."""
    datasets: dict[str, Any] = read_values(str(path))["train"]["train_policy"]["datasets"]
    changes = {"policy.model_name_or_path": here["model"]}
    for name, options in datasets.items():
        places = here.keys() & options.keys()
        changes |= {f"train.train_policy.datasets.{name}.{key}": here[key] for key in places}
    return tuple(f"{key}={json.dumps(value)}" for key, value in changes.items())


@by_name
def test_the_settings_of_a_shipped_recipe_are_valid_and_all_have_an_effect(path: Path):
    recipe, idle = checked(read_values(str(path)), str(path))
    assert (recipe.train.train_policy.type, idle) == (path.parent.name, [])
    assert recipe.policy.model_name_or_path == f"nvidia/Cosmos-Reason2-{'8B' if '8b' in path.stem else '2B'}"
    assert (recipe.policy.lora is not None) == path.stem.endswith("lora")


@by_name
def test_the_waves_of_a_recipe_fit_the_devices_of_every_profile_for_which_it_is_valid(path: Path, here, tmp_path: Path):
    valid: list[str] = []
    for profile in sorted((ROOT / "deployments/clusters").glob("*.toml")):
        try:
            plan = plan_of(Settings(str(path), overrides=on_this_machine(path, here), cluster=str(profile)))
        except ConfigError as error:
            if "cp_size" not in str(error):
                raise
            continue
        valid.append(profile.stem)
        launch, run = plan.recipe.launch, run_of(plan, str(tmp_path)).going_to(1)
        assert fitting.misfits(KIND.stages(plan.recipe), launch, None) == []
        for wave in post_train(run):
            assert launch.gpus is None or sum(need_of(step.kind, launch).count for step in wave.steps) <= launch.gpus
    assert {"four-gpus-sharded", "eight-gpus-sharded", "local", "slurm"} <= {*valid}


@by_name
@pytest.mark.parametrize("cluster", ["four-gpus-sharded", "eight-gpus-sharded"])
def test_a_shipped_recipe_plans_on_four_and_eight_gpus(path: Path, cluster: str, here):
    settings = Settings(str(path), overrides=on_this_machine(path, here), cluster=f"package:{cluster}")
    plan = plan_of(settings)
    assert isinstance(plan, VlmPlan)
    launch = plan.recipe.launch
    assert launch.gpu_limit == GPUS
    assert launch.dp_shard_size == launch.processes == (4 if cluster.startswith("four") else 8)
    assert plan.conversations == {"custom": ROWS}
    assert plan.model.adapter == "qwen_vl"
    used = {step.kind for wave in post_train(run_of(plan, "outputs")) for step in wave.steps}
    planned = KIND.stages(plan.recipe)
    assert {stage for stage in used if need_of(stage, launch).count} <= {*planned}
    assert fitting.misfits(planned, launch, None) == []


def test_each_recipe_has_one_deployment_that_shares_the_weights():
    found = {given["recipe"]: given["cluster"] for given in profiled().values() if f":{VLM_SFT}/" in given["recipe"]}
    assert found == {f"package:{VLM_SFT}/{path.stem}": "package:eight-gpus-sharded" for path in VLM_RECIPES}


@by_name
def test_a_long_video_is_scaled_to_nine_tenths_of_the_tokens_of_a_conversation(path: Path, here, tmp_path: Path):
    policy, options = (read_values(str(path))[name] for name in ("policy", "train"))
    video = {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 25_165_824}}
    folder = tiny.save(tmp_path, QWEN3, {"image": {"patch_size": 16}, "video": video})
    processor = processor_of(folder, policy["media"])
    frames = len(processor.sample(total=30 * 60, fps=30.0))
    assert frames == 60
    height, width = processor.size("video", frames, 1080, 1920)
    tokens = frames // 2 * height * width // FRAME
    most = options["train_policy"]["model_max_length"]
    assert 0.8 * most < tokens <= 0.9 * most
