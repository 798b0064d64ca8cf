"""How ranks are cut, what is refused."""

from dataclasses import astuple

import pytest
from pydantic import ValidationError

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import ALONE, Parallelism
from cosmos_rl_core.errors import ConfigError


def test_weights_are_cut_over_all_ranks_and_samples_over_groups_that_share_them():
    shared = Parallelism(world_size=12, dp_shard_size=4, cp_size=3)
    assert (shared.dp_replicate_size, shared.data_world_size) == (3, 4)
    assert (ALONE.dp_replicate_size, ALONE.data_world_size) == (1, 1)


def test_everything_that_does_not_fit_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        Parallelism(world_size=3, dp_shard_size=2, cp_size=0)
    assert str(error.value) == (
        "dp_shard_size = 2 does not divide 3 processes; cp_size = 0 does not divide 3 processes"
    )
    with pytest.raises(ConfigError, match="set dp_shard_size above 1"):
        Parallelism(world_size=2, fsdp_offload=True)


def test_a_stage_of_fewer_ranks_shares_among_its_own_ranks():
    launch = LaunchConfig(
        processes=8, stage_processes={"rollout": 2, "validate": 1}, dp_shard_size=4, cp_size=1, fsdp_offload=True
    )
    found = {stage: astuple(launch.parallelism_of(stage)) for stage in ("update", "rollout", "validate")}
    assert found == {
        "update": (8, 4, 1, True, False),
        "rollout": (2, 2, 1, True, False),
        "validate": (1, 1, 1, False, False),
    }


def test_processes_that_score_side_by_side_are_no_ranks():
    launch = LaunchConfig(processes=4, stage_processes={"reward": 7}, dp_shard_size=4)
    assert [launch.side_by_side(stage) for stage in ("reward", "rollout", "report")] == [7, 1, 1]
    assert launch.most_ranks == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"processes": 6, "dp_shard_size": 4}, "any other stage: dp_shard_size = 4 does not divide 6 processes"),
        ({"dp_shard_size": 8, "stage_processes": {"evaluate": 3}}, "evaluate: dp_shard_size = 8 does not divide 3 "),
        ({"processes": 2, "fsdp_offload": True}, "fsdp_offload = true needs sharded weights"),
    ],
)
def test_a_recipe_is_told_which_stages_cannot_share(settings: dict[str, object], said: str):
    with pytest.raises(ValidationError, match=said):
        LaunchConfig.model_validate(settings)
