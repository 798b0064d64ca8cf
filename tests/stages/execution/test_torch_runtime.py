"""What a process with torch records of itself once it is set up."""

import os
from pathlib import Path

import pytest
import torch

from cosmos_rl_core.parallel.precision import ParamDtype
from flows.planning import requests
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.execution import runner, torch_runtime
from stages.execution.execution import Execution
from tests.stages.conftest import make_run


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_the_recorded_dtype_is_the_dtype_that_products_are_computed_in(param_dtype: ParamDtype):
    group = torch_runtime.start(Execution())
    found = torch_runtime.numerics(group, param_dtype)
    assert (found["compute_dtype"], found["default_dtype"]) == (param_dtype, "float32")
    assert (found["world_size"], found["attention_backend"]) == (1, "native")


@pytest.mark.parametrize("tf32", [True, False])
def test_products_and_convolutions_round_their_factors_alike(tf32: bool):
    torch_runtime.start(Execution(tf32=tf32))
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (tf32, tf32)
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest")])
def test_a_manifest_tells_how_its_stage_multiplied(tf32: bool, precision: str, tmp_path: Path):
    values = {
        "policy": {"model_name_or_path": "package:tiny-sd3", "lora": {}, "diffusers": {"inference_size": [32, 64]}},
        "train": {"num_iterations": 1, "train_policy": {"type": "nft", "dataset": {"name": "ocr"}}},
        "rollout": {"n_generation": 4},
        "rewards": [{"fn": {"name": "ocr"}}],
    }
    request = requests.policy(make_run(tmp_path, values))
    path = tmp_path / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    Execution(tf32=tf32).write(path)
    assert runner.main([str(path)]) == 0
    assert Artifact(input_of(request.slot)).manifest.numerics["float32_matmul_precision"] == precision


def test_deterministic_kernels_sum_in_a_stated_order_and_fill_no_buffers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    torch_runtime.start(Execution(deterministic=False))
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    torch_runtime.start(Execution())
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
    assert not torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
