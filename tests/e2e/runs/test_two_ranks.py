"""A whole run on two ranks by the command line: NFT with two judges, which take turns on two devices.

The ranks are processes that stay, one a device. ``tests/flows/running/test_wave_on_ranks.py`` starts them by torchrun.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from cosmos_rl_core.config.toml import dumps
from cosmos_rl_core.recipes.reading import read_values
from stages.artifacts.slots import current_of
from tests.e2e.flow_process import Flows
from tests.twins.inputs import Inputs
from tests.twins.shrinking import twin_of

RANKS = 2
LAUNCH = {"processes": RANKS, "gpus": RANKS, "dp_shard_size": 1, "cp_size": 1, "mode": "warm", "resident_gb": 1}
TOGETHER = ("embed", "judge", "rollout", "update")
"""Stages that ranks share."""


@dataclass(frozen=True)
class Made:
    """A store after `run`, and the lines of the command."""

    flows: Flows
    said: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, prefect_environment: dict[str, str]) -> Made:
    """The run, which no test's body makes: two ranks compute for more than a minute."""
    folder = tmp_path_factory.mktemp("two-ranks")
    twin = twin_of("nft/sd3-nft-pickscore", Inputs(folder / "inputs"))
    # Without held-out samples, whose stages are made on ranks by tests of their own, and stages of one rank alone.
    values = read_values(twin.recipe) | {"early_warning": {"statistics": False}}
    del values["validation"]
    recipe = folder / "recipe.toml"
    recipe.write_text(dumps(values), encoding="utf-8")
    kept = [one for one in twin.overrides if not one.startswith(("launch.", "validation"))]
    kept += ["launch.device=cpu", *(f"launch.{name}={value}" for name, value in LAUNCH.items())]
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(RANKS)))}
    flows = Flows(folder, prefect_environment | devices, str(recipe))
    try:
        return Made(flows, flows.start(*(word for one in kept for word in ("--set", one))).finish(timeout_s=900))
    finally:
        flows.kill_all()


def test_every_stage_that_ranks_share_ran_on_both(made: Made):
    # Embeddings are in the store's pool, outside of the run.
    slots = {str(path.parent) for path in Path(made.flows.store).rglob("manifest.*.json")}
    found = [manifest for slot in slots if (manifest := current_of(slot)[1]) is not None]
    ranks = {one.stage: one.numerics["world_size"] for one in found if one.stage in TOGETHER}
    assert ranks == dict.fromkeys(TOGETHER, RANKS)


def test_judges_that_do_not_fit_at_once_take_turns(made: Made):
    assert made.said.count("does not fit the devices at once") == 1


def test_nothing_is_wrong_with_the_run_and_its_weights_are_exported(made: Made):
    assert "nothing is wrong" in made.flows.command("audit")
    exported = made.flows.folder / "exported"
    made.flows.command("export", str(exported))
    assert len([*exported.rglob("*.safetensors")]) == 1
