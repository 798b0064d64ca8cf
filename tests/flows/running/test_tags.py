"""Names and tags of deployments."""

import yaml

from cosmos_rl_core import shipped
from cosmos_rl_core.config.vlm import recipe as vlm_recipe
from cosmos_rl_core.config.vlm.recipe import VLM_SFT
from cosmos_rl_core.recipes.reading import read_values
from flows.planning.plan import Settings, plan_of
from flows.running.tags import PROJECT, tags_of
from tests.e2e.deployed import FILE, NAMES
from tests.e2e.flow_process import ROOT


def test_the_file_names_every_deployment_once_and_its_recipes_resolve():
    entries = yaml.safe_load((ROOT / FILE).read_text())["deployments"]
    named = [(entry["entrypoint"].rpartition(".")[2], entry["name"]) for entry in entries]
    flows = {"run": "stage", "check": "infra", "what_if": "what-if"}
    found = sorted((flows.get(flow, flow), name) for flow, name in named)
    assert found == sorted((flow, name) for flow, names in NAMES.items() for name in names)
    # Prefect's page of deployments shows the name alone. Deployments of all runs are told apart by their descriptions.
    names = [name for _, name in named if name != "runs"]
    assert len(set(names)) == len(names)
    for entry in entries:
        parameters = entry.get("parameters", {})
        assert entry["tags"][0] == PROJECT
        if (recipe := parameters.get("recipe")) is None:
            continue
        # The flow `train` takes every algorithm, which its name says.
        algorithm = entry["entrypoint"].rpartition(".")[2]
        algorithm = entry["name"].removeprefix("tiny-") if algorithm == "train" else algorithm
        assert f'type = "{algorithm}"' in shipped.path_of(recipe, "recipe").read_text()
        if algorithm == VLM_SFT:
            recipe, idle = vlm_recipe.checked(read_values(recipe, cluster=parameters.get("cluster")), recipe)
            assert not idle
            assert set(entry["tags"]) == tags_of(algorithm, "qwen_vl")
        elif entry["name"].startswith("tiny-"):
            plan = plan_of(Settings(recipe, cluster=parameters.get("cluster")))
            assert plan.recipe.train.train_policy.type == algorithm
            assert set(entry["tags"]) == tags_of(algorithm, plan.model.adapter)
