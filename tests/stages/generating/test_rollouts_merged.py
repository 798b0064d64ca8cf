"""Adapters are merged into the base where no step of a rollout is replayed, and where the base rests in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peft.tuners.lora import Linear
from torch.nn.modules.module import register_module_forward_hook

from cosmos_rl_core.weights.lora_layers import AdaptedLinear
from flows.planning import requests
from tests.stages.conftest import FEW_PROMPTS, make
from tests.stages.training.test_transitions import SDE, recipe, started, tensors_of

NFT = {"type": "nft", "mini_batch": 2, "dataset": FEW_PROMPTS}
EULER = {"num_steps": 4, "solver": "euler"}


@contextmanager
def counting_adapters() -> Iterator[list[str]]:
    """Yield a list that grows with every forward pass of a module whose adapters compute."""
    ran: list[str] = []

    def note(module: Any, *_: Any) -> None:
        if isinstance(module, Linear):
            assert isinstance(module, AdaptedLinear), "peft's own module takes more operations"
            ran.extend([] if module.is_off else ["pass"])

    hook = register_module_forward_hook(note)
    try:
        yield ran
    finally:
        hook.remove()


def values_of(train_policy: dict[str, Any], sample: dict[str, Any], param_dtype: str = "float32") -> dict[str, Any]:
    values = recipe(sample)
    values["train"] |= {"param_dtype": param_dtype}
    values["train"]["train_policy"] = train_policy or values["train"]["train_policy"]
    return values


@pytest.mark.parametrize(
    ("train_policy", "sample", "param_dtype", "merged"),
    [
        (NFT, EULER, "float32", True),
        (NFT, EULER, "bfloat16", False),
        ({}, SDE, "float32", False),
    ],
    ids=["nft", "half", "replayed"],
)
def test_adapters_are_merged_in_float32_if_no_step_is_replayed(
    train_policy: dict[str, Any], sample: dict[str, Any], param_dtype: str, merged: bool, tmp_path: Path
):
    run = started(tmp_path, values_of(train_policy, sample, param_dtype))
    with counting_adapters() as ran:
        make(requests.rollout(run, 0), tmp_path)
    assert len(tensors_of(run)) == 8
    assert (not ran) is merged


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_evaluations_merge_adapters_in_float32(param_dtype: str, tmp_path: Path):
    values = values_of({}, SDE, param_dtype)
    values["validation"] = {"n_generation": 1, "dataset": {"name": "ocr", "split": "test"}}
    run = started(tmp_path, values)
    make(requests.export(run, 0), tmp_path)
    with counting_adapters() as ran:
        make(requests.evaluate(run, 0), tmp_path)
    assert (not ran) is (param_dtype == "float32")
