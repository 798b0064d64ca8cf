"""The kernel of attention: permitted by name, recorded, and the one that runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.parallelism import Attention
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.numerics import SDP_KERNELS
from cosmos_rl_core.parallel.precision import use_attention
from cosmos_rl_core.pipelines.directories import resolve_path
from stages.execution import torch_runtime
from stages.execution.execution import Execution

RAN = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": "flash",
    "aten._scaled_dot_product_flash_attention.default": "flash",
    "aten._scaled_dot_product_efficient_attention.default": "mem_efficient",
    "aten._scaled_dot_product_cudnn_attention.default": "cudnn",
    "aten._safe_softmax.default": "math",
}
"""Kernels by an operation of theirs alone."""


class Kernels(TorchDispatchMode):
    """Collects the kernels of attention that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := str(func)) in RAN:
            self.found.add(RAN[name])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def all_permitted() -> Iterator[None]:
    yield
    use_attention("auto")


def ran() -> set[str]:
    """The kernels of a forward pass of the tiny SD3."""
    model = load_model(resolve_path("package:tiny-sd3"), ("transformer", "text"), CPU)
    conditioning = stack(model.encode_prompts(["a"], 12), CPU)
    x_t, t = torch.ones(1, *model.latent_shape((32, 64), 1), device=CPU), torch.tensor([0.5], device=CPU)
    with Kernels() as kernels, torch.no_grad():
        model.velocity(x_t, t, conditioning)
    return kernels.found


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_the_recorded_kernel_is_the_one_that_ran(attention: Attention):
    # What a library has switched before does not count.
    torch.backends.cuda.enable_flash_sdp(attention == "math")
    group = torch_runtime.start(Execution(attention=attention))
    recorded = torch_runtime.numerics(group, "float32")["attention_kernels"]
    assert recorded == [attention]
    assert ran() == {attention}


def test_without_a_choice_all_kernels_are_permitted_and_records_stay_as_before():
    torch.backends.cuda.enable_flash_sdp(False)
    group = torch_runtime.start(Execution())
    assert "attention_kernels" not in torch_runtime.numerics(group, "float32")
    permitted = {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SDP_KERNELS}
    assert permitted == {name: name != "cudnn" for name in SDP_KERNELS}
    assert ran() == {"flash"}


def test_kernels_of_gpus_are_refused_on_a_cpu():
    assert LaunchConfig(device="cpu", attention="math").attention == "math"
    with pytest.raises(ValidationError, match="attention = 'cudnn' is for GPUs; device = 'cpu' has 'flash' and 'math'"):
        LaunchConfig(device="cpu", attention="cudnn")
