"""What a process of a scorer makes of the scorer's errors, without a service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.reward_service.worker import Scoring, settle
from tests.running_service import PROBE, image_frame


@pytest.fixture
def plugins() -> Iterator[list[Any]]:
    outside_plugins.find([PROBE, PROBE.replace("probe.py", "probe_group.py")])
    yield [pin.model_dump(mode="json") for pin in outside_plugins.pins("")]
    outside_plugins.find([])


def answered(plugins: list[Any], tmp_path: Path, plugin: str, *prompts: str) -> list[Any]:
    scoring = Scoring({"plugin": plugin, "options": {"name": plugin}, "plugins": plugins, "batching": "exact"})
    (tmp_path / "frame").write_bytes(image_frame(*prompts, first=1))
    (answer,) = scoring.answers([{"frame": str(tmp_path / "frame")}])
    return [entry.get("scores", {}).get("probe") for entry in answer["entries"]]


def test_a_sample_that_raises_fails_alone(plugins: list[Any], tmp_path: Path):
    assert answered(plugins, tmp_path, "probe", "a", "raise", "b") == [1.0, None, 3.0]


def test_a_group_is_never_scored_in_parts(plugins: list[Any], tmp_path: Path):
    assert answered(plugins, tmp_path, "probe_group", "a", "raise", "b") == [None, None, None]


def test_running_out_of_memory_ends_the_process_and_fails_no_single_sample(plugins: list[Any], tmp_path: Path):
    with pytest.raises(MemoryError, match="no room for this one"):
        answered(plugins, tmp_path, "probe", "a", "memory")


def test_a_scorer_never_rounds_to_tf32(monkeypatch: pytest.MonkeyPatch):
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    for backend in backends:
        monkeypatch.setattr(backend, "allow_tf32", True)
    settle({"device": "cpu"})
    assert not any(backend.allow_tf32 for backend in backends)
