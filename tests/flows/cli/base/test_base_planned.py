"""Commands that plan: the limit of a server."""

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from flows.cli.base.planned import gpu_slots_of
from flows.devices import fitting
from flows.running import gpus
from tests.flows.devices.test_fitting import launch


def test_a_gpu_limit_that_does_not_exist_stops_a_run_but_no_plan(monkeypatch: pytest.MonkeyPatch):
    def slots(_: LaunchConfig) -> int | None:
        raise ConfigError("there is no limit")

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(gpus, "gpu_slots", slots)
    config = launch(gpu_limit="gpus", device="cpu")
    assert fitting.misfits_of(config, ["rollout"], slots, runs_here=True) == ["there is no limit"]
    with pytest.raises(ConfigError, match="there is no limit"):
        gpu_slots_of(config, required=True)
    assert gpu_slots_of(config, required=False) is None
    assert gpu_slots_of(launch(), required=True) is None
