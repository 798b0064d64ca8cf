"""Replays that are refused."""

from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import ConfigError
from flows.auditing.replay import replay
from flows.devices import fitting
from flows.devices.devices import VISIBLE
from flows.stage import run as run_stage
from stages.artifacts.slots import current_of
from tests.flows.by_hand import whole_run
from tests.flows.devices.test_fitting import GPUS, launch


def test_a_single_stage_and_a_replay_are_refused_as_a_run_is(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VISIBLE, ",".join(GPUS))
    cluster, half = tmp_path / "half.toml", launch(gpus=4, processes=8)
    cluster.write_text("[launch]\ngpus = 4\nprocesses = 8\n", encoding="utf-8")
    made = whole_run(recipe, tmp_path)
    refused = f"update: 8 GPUs, one for each process; launch.gpus = 4; {fitting.FEWER}"
    assert fitting.misfits_of(half, ["update"], lambda _: None, runs_here=True) == [refused]
    with pytest.raises(ConfigError) as of_replay:
        replay(made.store_url, made.plan.run_id, "update", 0, launch=half)
    assert str(of_replay.value).splitlines() == ["replay:", f"    {refused}"]
    before = current_of(made.slots.iteration(0, "update"))
    state: Any = run_stage.fn(made.plan.run_id, "update", 0, force=True, store=made.store_url, cluster=str(cluster))
    assert state.message.splitlines() == [f"{cluster}:", f"    {refused}"]
    assert current_of(made.slots.iteration(0, "update")) == before
