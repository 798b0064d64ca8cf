"""Frozen matrices that ranks share: stored in the half type of the computation, with the bits of gathered casts."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, moved, tensors_of
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.parallel import sharding
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import computes_in, float32_modules
from cosmos_rl_core.parallel.sharding import Shards
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.memory import Spread, halved, is_matrix, resting
from cosmos_rl_core.weights.half_weights import cast_frozen
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import prepare
from cosmos_rl_core.weights.shapes import weight_shapes
from tests.stages.ranks import start_ranks

pytestmark = pytest.mark.processes

HALF = torch.bfloat16
SHARED = Parallelism(world_size=2, dp_shard_size=2)


def shared(transformer: nn.Module, group: Group, folder: str, *, cast: bool, offload: bool) -> Shards:
    """As `load_policy` does it."""
    assert group.mesh is not None
    if cast:
        cast_frozen(transformer, "bfloat16")
    shards = sharding.shard(transformer, group.mesh, HALF, offload=offload)
    sharding.materialise(transformer, CPU, offload=offload)
    sharding.load_base(transformer, folder, shards)
    return shards


def outcome(folder: str, group: Group, *, cast: bool, offload: bool = False) -> tuple[dict[str, Tensor], int]:
    """Velocity and gradients of an adapter by name, and the bytes of all that a rank has of the base."""
    model: Any = load_model(folder, (EMPTY_TRANSFORMER, "text"), CPU)
    cut = partial(shared, group=group, folder=folder, cast=cast, offload=offload)
    weights = prepare(model.transformer, LoraConfig(r=2), shard=cut)
    weights.load(CURRENT, moved(tensors_of(weights, CURRENT), 0.1))
    conditioning = stack(model.encode_prompts(["a", "b"], 12), CPU)
    shape = (2, *model.latent_shape((64, 64), 5))
    x_t = torch.linspace(-1, 1, math.prod(shape), device=CPU).view(shape)
    with weights.use(CURRENT), computes_in("bfloat16", CPU):
        velocity = model.velocity(x_t, torch.tensor([0.3, 0.7], device=CPU), conditioning)
    velocity.square().mean().backward()
    found = {name: p.grad for name, p in weights.parameters.items() if p.grad is not None}
    base = [parameter for name, parameter in model.transformer.named_parameters() if ".lora_" not in name]
    kept = {parameter for module in float32_modules(model.transformer) for parameter in module.parameters()}
    assert {p.dtype for p in base if isinstance(p, DTensor) and p not in kept} == {HALF if cast else torch.float32}
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in base)
    return found | {"velocity": velocity.detach()}, held


def compare(folder: str) -> None:
    group = Group(60.0, SHARED)
    expected, before = outcome(folder, group, cast=False)
    for offload in (False, True):
        found, after = outcome(folder, group, cast=True, offload=offload)
        assert found.keys() == expected.keys()
        assert len(found) > 1
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert after < 0.6 * before
    if group.rank == 0:
        shapes, spread = weight_shapes(folder), Spread(SHARED, half=True)
        kept = directories.spec(folder).float32_modules
        assert before == resting(shapes, spread).device
        assert after == resting(shapes, spread, halved(kept, is_matrix)).device
    group.close()


def test_frozen_shards_in_bfloat16_give_the_bits_of_float32_shards_in_half_the_bytes(wan_path: str, tmp_path: Path):
    start_ranks(partial(compare, wan_path), tmp_path, 2, 300.0)
