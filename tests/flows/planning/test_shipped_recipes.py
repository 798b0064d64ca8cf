"""The recipes of configs/ whose models are on a hub: as written, and planned on tiny models of the same classes."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.toml import dumps
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers import translation
from cosmos_rl_core.recipes.reading import check, launch_of, read_values
from flows.checking import checks
from flows.devices import fitting
from flows.devices.devices import VISIBLE, need_of
from flows.explaining import explain
from flows.operations.pools import GPUS
from flows.planning.plan import Plan, Settings, plan_of
from flows.planning.run import run_of
from flows.post_train import post_train
from tests.test_rules import HUB_RECIPES, ROOT
from tests.twins import shrinking
from tests.twins.inputs import Inputs

UPSTREAM = ROOT / "tests/core/upstream_recipes"
SOURCES = {
    "ddrl/14b": "cosmos-predict2-5-14b-720-reason-embedding-ddrl",
    "ddrl/2b": "cosmos-predict2-5-2b-720-reason-embedding-ddrl",
    "grpo/2b": "cosmos-predict2-5-2b-480-grpo",
    "grpo/2b_mock": "cosmos-predict2-5-2b-480-grpo-mock-data",
    "nft/cosmos_2b": "cosmos-predict2-5-2b-720-nft",
    "nft/sana_image": "sana-image-nft",
    "nft/sana_video": "sana-video-nft",
    "nft/sd3": "stable-diffusion-3-5-medium-nft",
    "sft/sana_image": "sana-image-sft",
    "sft/sana_image_lora": "sana-image-sft-lora",
    "sft/sana_video": "sana-video-sft",
    "sft/sana_video_lora": "sana-video-sft-lora",
    "sft/sd3": "stable-diffusion-3-5-image-sft",
    "sft/sd3_lora": "stable-diffusion-3-5-image-sft-lora",
}
"""The recipe of cosmos-rl's that each of ours is; others have none."""
OWN = ("local_dir", "path", "num_iterations", "store_budget_gb", "max_keep", "model_gradient_checkpointing")
"""Settings that are the user's, or that a run here has and one of cosmos-rl's has not."""


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


by_name = pytest.mark.parametrize("path", HUB_RECIPES, ids=name_of)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def tiny(values: dict[str, Any], inputs: Inputs) -> tuple[str, ...]:
    """The overrides of a twin that leave the recipe's numbers of samples."""
    given = {} if "num_iterations" in values["train"] else {"train.num_iterations": 1}
    return shrinking.settings(shrinking.tiny(values, inputs) | given)


def planned(path: Path, inputs: Inputs, cluster: str | None = None) -> Plan:
    values = translation.translated(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    # Tiny models have two attention heads, for as many peers.
    peers = () if cluster is None else (f"launch.cp_size={min(launch_of(cluster).cp_size, 2)}",)
    return plan_of(Settings(str(path), overrides=tiny(values, inputs) + peers, cluster=cluster))


def settings(values: Any, name: str = "") -> dict[str, Any]:
    """Dotted names and values; JSON's types, so that 4 and 4.0 are one."""
    if isinstance(values, dict):
        return {
            key: held for part in values for key, held in settings(values[part], f"{name}.{part}".strip(".")).items()
        }
    if isinstance(values, list) and values and isinstance(values[0], dict):
        return settings(dict(zip(map(str, range(len(values))), values, strict=True)), name)
    return {name: values}


@by_name
def test_the_settings_of_a_shipped_recipe_are_valid(path: Path):
    recipe = check(read_values(str(path)), str(path))
    assert recipe.train.train_policy.type == path.parent.name


@pytest.mark.parametrize("path", [path for path in HUB_RECIPES if name_of(path) in SOURCES], ids=name_of)
def test_a_shipped_recipe_has_the_values_of_its_original_in_cosmos_rl(path: Path):
    ours = settings(tomllib.loads(path.read_text(encoding="utf-8")))
    theirs = settings(
        translation.translate(tomllib.loads((UPSTREAM / f"{SOURCES[name_of(path)]}.toml").read_text())).values
    )
    different = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    unexpected = {name for name in different if name.rpartition(".")[2] not in OWN}
    if name_of(path) == "grpo/2b_mock":  # a smoke test that needs no service
        unexpected = {name for name in unexpected if not name.startswith("rewards.")}
    assert not unexpected


@by_name
def test_a_shipped_recipe_plans_as_deployed_on_a_tiny_model_of_the_same_class(path: Path, inputs: Inputs):
    (deployed,) = (found for found in shrinking.profiled().values() if found["recipe"] == f"package:{name_of(path)}")
    plan = planned(path, inputs, deployed["cluster"])
    assert plan.recipe.launch.gpu_limit == GPUS
    assert plan.model.adapter == shrinking.family(tomllib.loads(path.read_text(encoding="utf-8")))
    assert len(plan.prompts) >= plan.recipe.prompts_per_iteration
    assert bool(plan.data_prompts) == (getattr(plan.recipe.train.train_policy, "data", None) is not None)


@by_name
def test_the_waves_of_a_recipe_fit_the_devices_of_every_profile_for_which_it_is_valid(
    path: Path, inputs: Inputs, tmp_path
):
    valid: list[str] = []
    for profile in sorted((ROOT / "deployments/clusters").glob("*.toml")):
        try:
            plan = planned(path, inputs, str(profile))
        except ConfigError as error:
            if "cp_size" not in str(error):
                raise
            continue
        valid.append(profile.stem)
        launch, run = plan.recipe.launch, run_of(plan, str(tmp_path)).going_to(1)
        waves = [[step.kind for step in wave.steps] for wave in post_train(run)]
        assert {s for wave in waves for s in wave if need_of(s, launch).count} <= {*checks.stages_of(plan.recipe)}
        assert fitting.misfits(checks.stages_of(plan.recipe), launch, None) == []
        for stages in waves:
            for places in fitting.turns(stages, launch, launch.gpus):
                count = sum(need_of(stages[place], launch).count for place in places)
                assert launch.gpus is None or count <= launch.gpus
    assert {"eight-gpus", "local", "slurm"} <= {*valid}


def test_a_plan_shows_the_judges_that_take_turns(inputs: Inputs, tmp_path: Path):
    plan = planned(ROOT / "configs/nft/sd3_pickscore.toml", inputs, "package:eight-gpus")
    judges = [reward.fn.label for reward in plan.recipe.rewards if reward.fn.facts.torch]
    found = explain.turns(plan, str(tmp_path))
    assert [len(judges), len(found)] == [2, 2]  # of a rollout, and of an evaluation
    for wave, cut in found.items():
        assert re.fullmatch(rf"\S*{judges[0]}\S*, then \S*{judges[1]}.*|\S*{judges[1]}\S*, then \S*{judges[0]}.*", cut)
        assert f"{wave} does not fit the devices at once: {cut}" in explain.explain_plan(plan, str(tmp_path))
    assert explain.turns(planned(ROOT / "configs/nft/sd3_pickscore.toml", inputs), str(tmp_path)) == {}


def test_a_plan_counts_the_gpus_of_the_profile_and_the_slots_of_its_limit(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster = tmp_path / "halves.toml"
    eight = (ROOT / "deployments/clusters/eight-gpus.toml").read_text(encoding="utf-8")
    cluster.write_text(eight.replace("\nprocesses = 8", "\nprocesses = 4"), encoding="utf-8")
    monkeypatch.setenv(VISIBLE, "GPU-of-a-workstation")
    plan = planned(ROOT / "configs/nft/sd3_pickscore.toml", inputs, str(cluster))
    assert explain.turns(plan, str(tmp_path)) == {}
    assert "does not fit the devices" not in explain.explain_plan(plan, str(tmp_path))
    assert explain.turns(plan, str(tmp_path), gpu_slots=8) == {}
    found = explain.turns(plan, str(tmp_path), gpu_slots=4)
    assert [cut.count("then") for cut in found.values()] == [1, 1]
    assert explain.as_json(plan, str(tmp_path), gpu_slots=4)["turns"] == found
    assert all(cut in explain.explain_plan(plan, str(tmp_path), gpu_slots=4) for cut in found.values())


@pytest.mark.parametrize("name", sorted(SOURCES.values()))
def test_cosmos_rls_own_file_plans_and_so_does_its_translation(name: str, inputs: Inputs, tmp_path):
    upstream, ours = UPSTREAM / f"{name}.toml", tmp_path / f"{name}.toml"
    values = translation.translate(tomllib.loads(upstream.read_text(encoding="utf-8"))).values
    ours.write_text(dumps(values), encoding="utf-8")
    assert translation.schema_of(tomllib.loads(ours.read_text(encoding="utf-8"))) is None
    overrides = list(tiny(values, inputs))
    assert check(read_values(str(ours), overrides), "ours") == check(read_values(str(upstream), overrides), "upstream")
    assert planned(upstream, inputs).prompts
