"""A whole run on two ranks by the command line: NFT with two judges, which take turns on two devices."""

from dataclasses import dataclass

import pytest

from tests.e2e.flow_process import Flows, standing_manifests
from tests.twins.inputs import Inputs
from tests.twins.shrinking import twin_of

RANKS = 2
LAUNCH = {"processes": RANKS, "gpus": RANKS, "dp_shard_size": 1, "cp_size": 1}
TOGETHER = ("evaluate", "judge", "rollout", "update")
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
    kept = [one for one in twin.overrides if not one.startswith(("launch.", "validation="))]
    # The recipe judges held-out samples at both ends; one prompt is enough.
    kept += ["launch.device=cpu", *(f"launch.{name}={value}" for name, value in LAUNCH.items())]
    kept += ["validation.n_generation=1", f'validation.dataset={{name="prompts", path="{folder / "one.txt"}"}}']
    (folder / "one.txt").write_text("a red cube", encoding="utf-8")
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(RANKS)))}
    flows = Flows(folder, prefect_environment | devices, twin.recipe)
    try:
        return Made(flows, flows.start(*(word for one in kept for word in ("--set", one))).finish(timeout_s=900))
    finally:
        flows.kill_all()


def test_every_stage_that_ranks_share_ran_on_both(made: Made):
    found = standing_manifests(made.flows).values()
    ranks = {one.stage: one.numerics["world_size"] for one in found if one.stage in TOGETHER}
    assert ranks == dict.fromkeys(TOGETHER, RANKS)


def test_judges_that_do_not_fit_at_once_take_turns(made: Made):
    assert made.said.count("does not fit the devices at once") == 3  # of both policies, and of the rollout


def test_nothing_is_wrong_with_the_run_and_its_weights_are_exported(made: Made):
    assert "nothing is wrong" in made.flows.command("audit")
    exported = made.flows.folder / "exported"
    made.flows.command("export", str(exported))
    assert len([*exported.rglob("*.safetensors")]) == 1
