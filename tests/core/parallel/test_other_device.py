"""The device that CPUs stand in for: what is not moved to it fails, and what is has the CPU's numbers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, LENGTH, PROMPTS
from cosmos_rl_core.models._conditioning import stack
from tests.other_device import DEVICE, OtherDevice


def test_a_tensor_that_was_not_moved_is_found():
    with OtherDevice():
        there = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            _ = there + torch.ones(3, device=CPU)
        number = torch.tensor(1.0, device=CPU)
        assert (there * number).device == DEVICE
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            torch.stack([there.sum(), number])
        with pytest.raises(TypeError, match="can't convert a tensor on lazy:0 to numpy"):
            there.numpy()
        assert (there + 1).device == DEVICE
        assert (there + torch.ones(3, device=CPU).to(DEVICE)).cpu().numpy().tolist() == [2, 2, 2]


def test_a_model_computes_on_another_device_as_on_the_cpu(tmp_path: Path):
    folder = str(tiny_pipelines.save("sd3", tmp_path / "sd3"))

    def gradient(device: torch.device) -> Tensor:
        model = load_model(folder, ("text", "transformer"), device)
        weight = next(p for name, p in model.transformer.named_parameters() if name.endswith("to_q.weight"))
        weight.requires_grad_()
        x = torch.linspace(-2, 2, 512, device=CPU).reshape(2, 4, 8, 8).to(device)
        conditioning = stack(model.encode_prompts(PROMPTS, LENGTH), device)
        velocity = model.velocity(x, torch.tensor([0.3, 0.9], device=device), conditioning)
        (found,) = torch.autograd.grad(velocity.square().mean(), weight)
        assert found.device == device
        return found.to(CPU)

    with OtherDevice():
        found, expected = gradient(DEVICE), gradient(CPU)
    # Attention is another sequence of operations there.
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
