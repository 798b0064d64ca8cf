"""SANA's linear attention in half precision: projections are bfloat16, its own products float32 as in diffusers."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.families import CPU, Family, family_of
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.weights import half_weights
from cosmos_rl_core.weights.lora_layers import AdaptedLinear
from cosmos_rl_core.weights.policy_weights import prepare

T = torch.tensor([0.3, 0.9], device="cpu")
FLOAT32, BFLOAT16 = {torch.float32}, {torch.bfloat16}


@pytest.fixture(scope="module", params=["sana", "sana_video"])
def sana(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_of(request.param, tmp_path_factory.mktemp("linear"))


class Products(TorchDispatchMode):
    """The types of the factors of matrix products inside linear attention: of its projections, and of all others."""

    def __init__(self) -> None:
        super().__init__()
        self.of_projections: set[torch.dtype] = set()
        self.others: set[torch.dtype] = set()
        self.projects = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            found = self.of_projections if self.projects else self.others
            found |= {factor.dtype for factor in args if isinstance(factor, Tensor)}
        return func(*args, **kwargs or {})


@contextmanager
def products_of(transformer: nn.Module) -> Iterator[Products]:
    """The products inside all linear attention modules."""
    products, hooks = Products(), list[Any]()

    def projects(begins: bool) -> Any:
        return lambda *_: setattr(products, "projects", begins)

    for name, module in transformer.named_modules():
        if name.endswith("attn1"):
            hooks.append(module.register_forward_pre_hook(lambda *_: products.__enter__() and None))
            hooks.append(module.register_forward_hook(lambda *_: products.__exit__(None, None, None)))
            adapted = [one for one in module.modules() if isinstance(one, AdaptedLinear)]
            inside = {part for one in adapted for part in one.modules()}
            for part in (*adapted, *(one for one in module.modules() if type(one) is nn.Linear and one not in inside)):
                hooks.append(part.register_forward_pre_hook(projects(True)))
                hooks.append(part.register_forward_hook(projects(False)))
    assert hooks
    yield products
    for hook in hooks:
        hook.remove()


def velocity(sana: Family, model: Any) -> Tensor:
    with computes_in("bfloat16", CPU):
        return model.velocity(sana.noise, T, sana.conditioning)


def test_products_are_float32_and_projections_bfloat16_as_in_the_stock_half_pipeline(sana: Family):
    model = sana.load("transformer")
    with torch.no_grad(), products_of(model.transformer) as ours:
        velocity(sana, model)
    assert (ours.others, ours.of_projections) == (FLOAT32, BFLOAT16)
    stock = type(sana.stock.transformer).from_pretrained(sana.folder, subfolder="transformer", dtype=torch.bfloat16)
    model.pipeline.transformer = stock
    texts = sana.conditioning.each(lambda value: value.bfloat16())
    with torch.no_grad(), products_of(stock) as theirs:
        model.velocity(sana.noise.bfloat16(), T, texts)
    assert (theirs.others >= FLOAT32, theirs.of_projections) == (True, BFLOAT16)


def test_a_policy_that_trains_and_the_transformer_of_an_evaluation_compute_alike(sana: Family):
    model = sana.load("transformer")
    prepare(model.transformer, LoraConfig(r=2, target_modules=("to_q", "to_k", "to_v", "to_out.0")))
    with products_of(model.transformer) as trained:
        velocity(sana, model).square().mean().backward()
    assert (trained.others, trained.of_projections) == (FLOAT32, BFLOAT16)
    gradients = [p.grad for p in model.transformer.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)

    evaluated: Any = sana.load("transformer")
    plain = velocity(sana, evaluated)
    evaluated.pipeline.transformer = half_weights.load(sana.folder, "bfloat16", CPU)
    with torch.no_grad(), products_of(evaluated.transformer) as stored:
        found = evaluated.velocity(sana.noise, T, sana.conditioning)
    assert (stored.others, stored.of_projections) == (FLOAT32, BFLOAT16)
    assert torch.equal(found, plain)


@torch.no_grad()
def test_the_products_round_once_and_not_at_every_step(sana: Family, record_property: Any):
    """With projections that change nothing, what is left is the rounding of the result: 2^-9 at most, 1.7e-3."""
    model: Any = sana.load("transformer")
    attention = model.transformer.get_submodule("transformer_blocks.0.attn1")
    given: list[Any] = []
    attention.register_forward_pre_hook(lambda _, args, named: given.append((args, named)), with_kwargs=True)
    model.velocity(sana.noise, T, sana.conditioning)
    (((hidden_states,), named),) = given
    plain = copy.deepcopy(sana.stock.transformer.get_submodule("transformer_blocks.0.attn1"))
    exact = plain(hidden_states, **named)
    assert torch.equal(attention(hidden_states, **named), exact), "float32 bits equal diffusers'"

    for one in (attention, plain):
        for projection in (one.to_q, one.to_k, one.to_v, one.to_out[0]):
            nn.init.eye_(projection.weight)
        nn.init.zeros_(one.to_out[0].bias)
    hidden_states = hidden_states.bfloat16().float()
    exact = plain(hidden_states, **named)
    with computes_in("bfloat16", CPU):
        found = [one(hidden_states, **named) for one in (attention, plain)]
    errors = [float((one - exact).square().mean().sqrt() / exact.square().mean().sqrt()) for one in found]
    record_property("errors", errors)
    assert errors[0] < 2**-9
    assert errors[1] > 1.4 * errors[0]
