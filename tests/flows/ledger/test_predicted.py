"""Times that are predicted."""

import json

import pytest
from typer.testing import CliRunner

from flows.cli import app as cli
from flows.ledger import predicted


@pytest.mark.slow
def test_the_time_counts_forward_passes_on_devices_of_a_stated_speed(recipe):
    ended = CliRunner().invoke(cli.app, ["plan", recipe(), "--json", "--set", "launch.processes=2"])
    time = json.loads(ended.stdout)["time"]
    stages = {stage["stage"]: stage for stage in time["stages"]}
    # 8 samples of 10 steps; 8 samples at 10 levels: forward, LoRA's backward, its recomputation, and the old copy.
    passes = {name: stage["flops"] / time["forward_flops"] for name, stage in stages.items()}
    assert passes == {"rollout": 80, "update": 80 * 4}
    assert stages["update"]["ranks"] == 2
    causes = stages["update"]["causes"]
    assert causes["transformer"] == stages["update"]["flops"] / (2 * time["device_flops"])
    assert stages["update"]["seconds"] == sum(causes.values())
    assert causes["start"] == predicted.COLD_ON_CPU_S
    # Eight samples in tiles of eight: the second rank waits for the first.
    assert stages["rollout"]["causes"]["wait for the last rank"] == stages["rollout"]["causes"]["transformer"]
