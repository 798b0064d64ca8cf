"""Every recipe has a deployment with a profile, and each of these a twin whose settings are valid."""

from pathlib import Path

import pytest

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.recipes.reading import launch_of
from flows.operations.pools import GPUS
from flows.planning import facts
from flows.planning.plan import Settings, plan_of
from tests.test_rules import ROOT
from tests.twins import shrinking
from tests.twins.__main__ import arguments, undone
from tests.twins.inputs import Inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def test_every_recipe_of_real_weights_is_deployed_with_a_profile():
    recipes = {f"package:{path.parent.name}/{path.stem}" for path in (ROOT / "configs").glob("*/*.toml")}
    real = {
        recipe for recipe in recipes if not recipe.startswith(tuple(f"package:{n}/" for n in shrinking.PREPARATION))
    }
    assert {given["recipe"] for given in shrinking.profiled().values()} == real
    assert len(shrinking.profiled()) == len(real)


@pytest.mark.parametrize("name", sorted(shrinking.profiled()))
def test_a_twin_of_each_plans(name: str, inputs: Inputs):
    twin = shrinking.twin_of(name, inputs)
    plan = plan_of(Settings(twin.recipe, overrides=twin.overrides, cluster=twin.cluster))
    launch, profile = plan.recipe.launch, launch_of(twin.cluster)
    assert (launch.processes, launch.gpu_limit) == (min(4, profile.processes), GPUS)
    for ours, theirs in ((launch.dp_shard_size, profile.dp_shard_size), (launch.cp_size, profile.cp_size)):
        assert launch.processes % ours == 0
        assert ours <= theirs < (ours + 1 if theirs <= launch.processes else 9)
    assert plan.recipe.validation is not None
    read = type(plan).model_validate_json(canonical_json(plan.model_dump(mode="json")))
    assert facts.settings(read, identity=True) == facts.settings(plan, identity=True)


@pytest.mark.parametrize(
    ("number", "most", "divisor"), [(4, 8, 4), (4, 3, 2), (4, 2, 2), (4, 1, 1), (3, 2, 1), (6, 4, 3)]
)
def test_shards_are_the_largest_divisor_that_a_profile_allows(number: int, most: int, divisor: int):
    assert shrinking.divisor(number, most) == divisor


def test_parts_share_all_twins_and_those_that_were_ok_are_not_run_again(tmp_path: Path):
    results = tmp_path / "results.jsonl"
    parts = [[*undone(arguments(["--part", f"{i}/3", "--results", str(results)]))] for i in (1, 2, 3)]
    assert sorted(name for names in parts for name in names) == sorted(shrinking.profiled())
    results.write_text('{"twin": "ddrl/14b", "ok": true}\n{"twin": "ddrl/2b", "ok": false}\n', encoding="utf-8")
    left = [*undone(arguments(["--results", str(results)]))]
    assert sorted({*left, "ddrl/14b"}) == sorted(shrinking.profiled())
    assert "ddrl/14b" not in left
