"""Every model plugin with its transformer's repeated blocks compiled, against the same one as it is.

On a GPU by inductor, as stages compile; on a CPU, where that takes minutes, captured in the same way and then run by
PyTorch's own kernels.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cosmos_rl_core import sharding
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.policy_weights import CURRENT, prepare
from cosmos_rl_core.precision import ParamDtype, computes_in
from tests.families import Family, has_autocast, moved

LORA = LoraConfig(r=4, lora_alpha=8.0)


@pytest.fixture(autouse=True)
def no_versions_kept() -> Iterator[None]:
    """Each test compiles anew, and a block of which too many versions were needed is an error, not run as it is."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
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


# `make test` compiles one model in tests/core/test_policy_weights.py.
@pytest.mark.slow
def test_compiled_blocks_compute_what_the_transformer_does(family: Family, record_property):
    """In float32 up to rounding; in bfloat16, which fused operations round less often, no further from float32."""
    if not has_autocast(family.device):
        pytest.skip("this device is made of what compilers cannot capture")
    model = family.load("transformer")
    weights = prepare(model.transformer, LORA)
    weights.load(CURRENT, moved(weights.get(CURRENT), 0.2))
    dtypes: tuple[ParamDtype, ...] = ("float32", "bfloat16")
    plain = {dtype: outcome(family, model, dtype) for dtype in dtypes}
    sharding.compile_blocks(model.transformer, "inductor" if family.device.type == "cuda" else "aot_eager")
    compiled = {dtype: outcome(family, model, dtype) for dtype in dtypes}
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    exact = plain["float32"]
    for name, number, bound in (("velocity", 0, 1e-5), ("gradients", 1, 1e-4)):
        drift = off(compiled["float32"][number], exact[number])
        in_bfloat16 = [off(each["bfloat16"][number], exact[number]) for each in (plain, compiled)]
        record_property(name, [drift, *in_bfloat16])
        assert drift < bound
        assert 1e-4 < in_bfloat16[1] < 2 * in_bfloat16[0]
