"""Which modules compute in float32 in a half-precision run: those that the stock ``from_pretrained`` keeps so."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cosmos_rl_core.conformance.models.families import Family, has_autocast
from cosmos_rl_core.parallel.precision import MATRICES, computes_in


@torch.no_grad()
def test_in_bfloat16_the_same_matrices_stay_float32_as_in_the_stock_pipeline(family: Family):
    """They give the same bits. Among the five families they are the matrices that embed Wan's timestep."""
    if not has_autocast(family.device):
        pytest.skip("this device has no autocast")
    model: Any = family.load("transformer")
    t = torch.tensor([0.3, 0.71234], device=family.device)
    with answers_of(model.transformer) as ours, computes_in("bfloat16", family.device):
        model.velocity(family.noise, t, family.conditioning)
    stock = type(family.stock.transformer).from_pretrained(family.folder, subfolder="transformer", dtype=torch.bfloat16)
    kept = {name for name, module in stock.named_modules() if isinstance(module, MATRICES) and is_float32(module)}
    assert {name for name, answer in ours.items() if answer.dtype == torch.float32} == kept
    assert bool(kept) == (family.name in ("wan", "wan_i2v"))
    if kept:
        model.pipeline.transformer = stock.to(family.device)
        with answers_of(stock) as theirs:
            texts = {name: value.bfloat16() for name, value in family.conditioning.items()}
            model.velocity(family.noise.bfloat16(), t, texts)
        assert all(torch.equal(ours[name], theirs[name]) for name in kept)


def is_float32(module: nn.Module) -> bool:
    return all(p.dtype == torch.float32 for p in module.parameters())


@contextmanager
def answers_of(transformer: nn.Module) -> Iterator[dict[str, Tensor]]:
    """By name, what each linear and convolution module answers last."""
    answers: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _, given, answer, name=name: answers.update({name: answer}))
        for name, module in transformer.named_modules()
        if isinstance(module, MATRICES)
    ]
    yield answers
    for hook in hooks:
        hook.remove()
