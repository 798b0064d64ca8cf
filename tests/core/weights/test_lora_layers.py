"""Modules with adapters compute what peft's compute, in fewer operations."""

from collections import Counter
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.weights.lora_layers import KeyedDropout, adapt, dropping

CPU = torch.device("cpu")
SCALE = 3 / 7


class Operations(TorchDispatchMode):
    """Counts operations by name: neither views nor casts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func not in (torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device=CPU)


def of_peft(adapters: int = 1) -> nn.Module:
    """A linear module with adapters by peft, each of a scale that is no power of two."""
    module: Any = nn.Sequential(nn.Linear(24, 40, device=CPU))
    for number in range(adapters):
        config = peft.LoraConfig(r=7, lora_alpha=3, target_modules=["0"])
        module = peft.inject_adapter_in_model(config, module, adapter_name=f"adapter {number}")
    layer = module[0]
    layer.set_adapter([*layer.lora_A])
    for number, (_, parameter) in enumerate(sorted(layer.named_parameters())):
        parameter.data = 0.3 * drawn(*parameter.shape, seed=number)
        parameter.requires_grad_(True)
    return module


def result_and_gradients(module: nn.Module, x: Tensor, param_dtype: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with computes_in(param_dtype, CPU):
        result = module(x)
    module.zero_grad()
    (result.float() * drawn(*result.shape, seed=5)).sum().backward()
    gradients = [x.grad, *(parameter.grad for _, parameter in sorted(module.named_parameters()))]
    return [result.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(("param_dtype", "bound"), [("float32", 2e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("adapters", [1, 2])
@pytest.mark.parametrize("shape", [(3, 5, 24), (4, 24), (24,)])
def test_results_and_gradients_equal_peft_up_to_rounding(
    shape: tuple[int, ...], adapters: int, param_dtype: str, bound: float
):
    stock, ours = of_peft(adapters), of_peft(adapters)
    assert len(adapt(ours)) == 1
    of_both = [result_and_gradients(module, drawn(*shape), param_dtype) for module in (stock, ours)]
    assert len(of_both[0]) == 4 + 2 * adapters
    for expected, found in zip(*of_both, strict=True):
        assert found.dtype == expected.dtype
        assert float((found - expected).abs().max()) <= bound * float(expected.abs().max())


def test_an_adapter_takes_two_operations_and_none_if_it_is_off():
    module, x = of_peft(), drawn(3, 5, 24)
    (layer,) = adapt(module)

    def operations() -> Counter[str]:
        with torch.no_grad(), computes_in("bfloat16", CPU), Operations() as run:
            module(x)
        return run.counts

    assert operations() == {"addmm": 1, "mm": 1, "addmm_": 1}
    layer.is_off = True
    assert operations() == {"addmm": 1}


def test_a_base_that_stays_float32_gives_float32():
    module, x = of_peft(), drawn(3, 5, 24)
    (layer,) = adapt(module)
    base: Any = layer.base_layer
    forward = base.forward

    def in_float32(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    base.forward = in_float32
    with torch.no_grad(), computes_in("bfloat16", CPU):
        found, alone = module(x), base(x)
    assert (found.dtype, alone.dtype) == (torch.float32, torch.float32)
    (name,) = layer.lora_A
    delta = x @ layer.get_delta_weight(name).T
    torch.testing.assert_close(found, alone + delta, rtol=0.0, atol=0.03 * float(delta.detach().abs().max()))


def test_the_switches_of_peft_have_their_effect():
    module, x = of_peft(), drawn(3, 5, 24)
    (layer,) = adapt(module)
    expected = module(x)
    layer.merge()
    torch.testing.assert_close(module(x), expected)
    layer.unmerge()
    layer.enable_adapters(enabled=False)
    torch.testing.assert_close(module(x), layer.base_layer(x))


def test_dropout_reaches_the_adapter_alone():
    module, x = of_peft(), drawn(2, 5, 24)
    (layer,) = adapt(module)
    dropout = KeyedDropout("0", 0.5)
    (name,) = layer.lora_A
    layer.lora_dropout[name] = dropout
    with torch.no_grad(), dropping([dropout], [(1,), (2,)]):
        kept = dropout(x)
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        expected = layer.base_layer(x) + SCALE * kept @ a.T @ b.T  # pyright: ignore[reportOperatorIssue, reportAttributeAccessIssue]
        torch.testing.assert_close(module(x), expected)
    assert 0.2 < float((kept == 0).float().mean()) < 0.8
