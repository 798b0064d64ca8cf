"""Every model plugin with its transformer's repeated blocks compiled, against the same one as it is.

Of the GPU lane, since compiling is slow on a CPU.
"""

import pytest
import torch
from torch import Tensor

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.policy_weights import CURRENT, REFERENCE, PolicyWeights, prepare
from cosmos_rl_core.precision import ParamDtype, computes_in
from cosmos_rl_core.sharding import blocks
from tests.families import Family, moved

LORA = LoraConfig(r=4, lora_alpha=8.0)
pytestmark = pytest.mark.gpu


def policy_of(family: Family) -> tuple[Model, PolicyWeights]:
    model = family.load("transformer")
    weights = prepare(model.transformer, LORA)
    weights.load(CURRENT, moved(weights.get(CURRENT), 0.2))
    return model, weights


def compile_blocks(model: Model) -> None:
    """What ``compile_repeated_blocks`` does; of the five transformers only Wan's names its blocks to that method."""
    repeated = blocks(model.transformer)
    assert repeated
    for block in repeated:
        block.compile()


def velocity_of(family: Family, model: Model, dtype: ParamDtype) -> Tensor:
    with computes_in(dtype, family.device):
        return model.velocity(family.noise, torch.tensor([0.3, 0.9], device=family.device), family.conditioning)


@pytest.fixture(autouse=True)
def afresh() -> None:
    """Each test compiles anew: the number of versions of a block that is kept is limited."""
    torch.compiler.reset()


@torch.no_grad()
def test_a_compiled_velocity_in_float32_is_that_of_the_transformer_as_it_is(family: Family):
    model, _ = policy_of(family)
    expected = velocity_of(family, model, "float32")
    compile_blocks(model)
    found = velocity_of(family, model, "float32")
    assert (found - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


@torch.no_grad()
def test_a_compiled_velocity_in_bfloat16_is_no_further_from_float32_than_twice_the_one_as_it_is(family: Family):
    """Fused operations round less often: compiled and not, bfloat16 gives other numbers of the same quality."""
    model, _ = policy_of(family)
    exact = velocity_of(family, model, "float32")
    bound = 2 * (velocity_of(family, model, "bfloat16") - exact).square().mean().sqrt()
    compile_blocks(model)
    assert 0 < (velocity_of(family, model, "bfloat16") - exact).square().mean().sqrt() < bound


def test_compiled_blocks_have_the_gradients_and_take_the_parts_of_a_policy(family: Family):
    """Adapters are swapped under a compiled block, which must see them."""
    model, weights = policy_of(family)

    def outcome() -> tuple[Tensor, dict[str, Tensor]]:
        model.transformer.zero_grad()
        velocity_of(family, model, "float32").square().mean().backward()
        with weights.use(REFERENCE):
            base = velocity_of(family, model, "float32")
        return base, {name: _gradient(p) for name, p in weights.parameters.items()}

    base, gradients = outcome()
    compile_blocks(model)
    compiled_base, found = outcome()
    assert (compiled_base - base).abs().max() < 1e-5 * max(1.0, float(base.abs().max()))
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0
    assert max(float((found[name] - gradients[name]).abs().max()) for name in gradients) < 1e-4 * largest


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
