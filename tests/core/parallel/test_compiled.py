"""Every model plugin with its transformer's repeated blocks compiled, against the same one as it is.

On a GPU by inductor, as stages compile; on a CPU, where that takes minutes, captured in the same way and then run by
PyTorch's own kernels.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.families import Family, has_autocast, moved, tensors_of
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.parallel import compiling
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import prepare

LORA = LoraConfig(r=4, lora_alpha=8.0)


@pytest.fixture(autouse=True)
def no_versions_kept() -> Iterator[None]:
    """Each test compiles anew, and leaves PyTorch's limits as they were."""
    torch.compiler.reset()
    kept = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in kept}):
        yield
    torch.compiler.reset()


def outcome(family: Family, model: Model, dtype: ParamDtype) -> tuple[Tensor, Tensor]:
    """The velocity, and the gradients of all adapters in one row."""
    trained = [parameter for parameter in model.transformer.parameters() if parameter.requires_grad]
    with computes_in(dtype, family.device):
        velocity = model.velocity(family.noise, torch.tensor([0.3, 0.9], device=family.device), family.conditioning)
    gradients = torch.autograd.grad(velocity.square().mean(), trained, materialize_grads=True)
    return velocity.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def off(found: Tensor, exact: Tensor) -> float:
    """Root mean square difference, as a share of what is exact."""
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


class Block(nn.Module):
    def forward(self, x: Tensor, times: str) -> Tensor:
        """Each word needs a version of the code of its own."""
        return x * len(times)


class Blocks(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor, times: str) -> Tensor:
        return self.second(self.first(x, times), times)


def test_more_versions_of_a_block_than_pytorch_keeps_by_itself_are_compiled():
    blocks = Blocks()
    compiling.compile_blocks(blocks, "eager")
    x = torch.ones(2, device="cpu")
    for n in range(1, 21):
        assert blocks(x, "w" * n).tolist() == [n * n] * 2
    # No version was run as it is written.
    with torch.compiler.set_stance("fail_on_recompile"):
        assert blocks(x, "w" * 20).tolist() == [400.0] * 2


def test_a_block_that_needs_too_many_versions_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "VERSIONS", 2)
    blocks = Blocks()
    compiling.compile_blocks(blocks, "eager")
    x = torch.ones(2, device="cpu")
    for n in (1, 2):
        blocks(x, "w" * n)
    with pytest.raises(FailOnRecompileLimitHit):
        blocks(x, "www")


# `make test` compiles one model in tests/core/weights/test_policy_weights.py.
@pytest.mark.slow
def test_compiled_blocks_compute_what_the_transformer_does(family: Family, record_property):
    """In float32 up to rounding; in bfloat16, which fused operations round less often, no further from float32."""
    if not has_autocast(family.device):
        pytest.skip("this device is made of what compilers cannot capture")
    model = family.load("transformer")
    weights = prepare(model.transformer, LORA)
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), 0.2))
    dtypes: tuple[ParamDtype, ...] = ("float32", "bfloat16")
    plain = {dtype: outcome(family, model, dtype) for dtype in dtypes}
    compiling.compile_blocks(model.transformer, "inductor" if family.device.type == "cuda" else "aot_eager")
    compiled = {dtype: outcome(family, model, dtype) for dtype in dtypes}
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    exact = plain["float32"]
    for name, number, bound in (("velocity", 0, 1e-5), ("gradients", 1, 1e-4)):
        drift = off(compiled["float32"][number], exact[number])
        in_bfloat16 = [off(each["bfloat16"][number], exact[number]) for each in (plain, compiled)]
        record_property(name, [drift, *in_bfloat16])
        assert drift < bound
        assert 1e-4 < in_bfloat16[1] < 2 * in_bfloat16[0]
