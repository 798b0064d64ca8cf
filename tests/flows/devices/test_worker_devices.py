"""Devices of elastic stages: what they need to begin, and which settings are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import Parallelism
from flows.devices.devices import Need, need_of, need_of_worker, shares_of


def launch(**settings: Any) -> LaunchConfig:
    return LaunchConfig.model_validate({"elastic": {"min": 2, "max": 4}} | settings)


def test_a_stage_begins_with_the_devices_of_its_first_workers_each_of_which_holds_a_model() -> None:
    wide = launch(processes=8, dp_shard_size=2, cp_size=4)
    assert need_of_worker("rollout", wide) == Need("rollout", 4)
    assert shares_of("rollout", wide) == [Need("rollout", 4)] * 2
    assert need_of("rollout", wide).count == 8
    assert wide.parallelism_of("rollout") == Parallelism(world_size=4, dp_shard_size=2, cp_size=4)
    # A text encoder, a VAE and a scorer are never shared.
    assert [need_of_worker(stage, wide).count for stage in ("embed", "evaluate", "judge")] == [1, 1, 1]
    assert need_of("reward", wide).count == 0
    assert shares_of("update", wide) == [Need("update", 8)]


def test_workers_share_the_devices_that_a_stage_was_given() -> None:
    chosen = launch(stage_gpus={"rollout": [0, 1, 2]})
    assert shares_of("rollout", chosen) == [Need("rollout", 1, (0, 1, 2))] * 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"elastic": {"min": 3, "max": 2}}, "min = 3 is above max = 2"),
        ({"launcher": "slurm"}, "elastic needs launcher = 'local'"),
        ({"gpu_limit": "gpus"}, "gpu_limit has slots for a fixed number of GPUs"),
        ({"stage_processes": {"rollout": 2}}, "stage_processes.rollout is given, and elastic decides"),
        ({"stage_gpus": {"rollout": [0]}}, "must be different GPUs, one for each of its 2 processes"),
    ],
)
def test_settings_that_contradict_workers_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        launch(**settings)
