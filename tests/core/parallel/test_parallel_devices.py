"""Where ranks compute: on the device that was asked for, or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel.devices import VISIBLE, current, settled
from cosmos_rl_core.parallel.distributed import Group
from stages.artifacts.request import Request
from stages.contracts import Embed, ModelRef
from stages.execution.execution import Execution

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where CUDA cannot be used")


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Puts the variable back, which a process that is told to compute on the CPU empties."""
    monkeypatch.setenv(VISIBLE, "")
    return monkeypatch


def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_an_error_that_says_why():
    with pytest.raises(ConfigError, match=r"launch\.device = 'cuda', and .* cannot use CUDA: .*torch"):
        settled("cuda")
    with pytest.raises(ConfigError, match="cannot use CUDA"):
        Group(60.0, device="cuda")


@pytest.mark.parametrize("named", ["0", "GPU-aaaa1111-0000,GPU-bbbb", "MIG-cccc", " 3, 1"])
def test_a_gpu_that_is_assigned_and_cannot_be_used_is_an_error(shown: pytest.MonkeyPatch, named: str):
    shown.setenv(VISIBLE, named)
    for ask in (lambda: settled(None), current, lambda: Group(60.0)):
        with pytest.raises(ConfigError, match=f"{VISIBLE} = '{named}', and .* cannot use CUDA"):
            ask()


@pytest.mark.parametrize("named", ["", "-1", "NoDevFiles"])
def test_where_no_gpu_is_assigned_ranks_compute_on_the_cpu(shown: pytest.MonkeyPatch, named: str):
    shown.setenv(VISIBLE, named)
    assert settled(None) == current() == Group(60.0).device == torch.device("cpu")


def test_the_cpu_hides_the_devices_from_all_that_a_process_loads(shown: pytest.MonkeyPatch):
    shown.setenv(VISIBLE, "GPU-aaaa1111-0000")
    assert Group(60.0, device="cpu").device == torch.device("cpu")
    assert os.environ[VISIBLE] == ""
    assert current() == torch.device("cpu")


def test_a_stage_without_the_wanted_device_ends_with_a_config_error(tmp_path: Path):
    request = tmp_path / "request.json"
    texts = Embed(model=ModelRef(path="nowhere", adapter="sd3", digest=""), max_prompt_length=8)
    embed = Request(stage="embed", slot=str(tmp_path / "slot"), seed=0, config=texts)
    request.write_text(embed.model_dump_json(), encoding="utf-8")
    Execution(device="cuda").write(request)
    command = [sys.executable, "-m", "stages.execution.runner", str(request)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    error = json.loads((tmp_path / "error.0.json").read_bytes())
    assert (ended.returncode, error["kind"]) == (64, "config")
    assert "launch.device = 'cuda'" in error["message"]
