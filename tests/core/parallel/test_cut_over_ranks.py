"""How true configurations are cut over hundreds of ranks, without weights: one process that takes itself for many."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from diffusers import CosmosTransformer3DModel, WanTransformer3DModel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.parallel import sharding
from cosmos_rl_core.parallel.sharding import REPLICATE, SHARD
from cosmos_rl_core.weights.policy_weights import prepare

WORLD_SIZE = 256
COSMOS = {
    "in_channels": 17,
    "out_channels": 16,
    "attention_head_dim": 128,
    "text_embed_dim": 1024,
    "adaln_lora_dim": 256,
    "max_size": (128, 240, 240),
    "extra_pos_embed_type": None,
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 100352,
    "encoder_hidden_states_channels": 1024,
}
TRUE = {
    "cosmos 2B": (CosmosTransformer3DModel, COSMOS | {"num_attention_heads": 16, "num_layers": 28}, 8),
    "cosmos 14B": (CosmosTransformer3DModel, COSMOS | {"num_attention_heads": 40, "num_layers": 36}, 32),
    "wan 14B": (
        WanTransformer3DModel,
        {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824, "attention_head_dim": 128},
        32,
    ),
}
"""Class, configuration and the ranks that share one copy of the weights, as cosmos-rl's recipes advise."""


@pytest.fixture(scope="module")
def all_ranks() -> Iterator[None]:
    """This process is the second last rank of so many."""
    dist.init_process_group("fake", rank=WORLD_SIZE - 2, world_size=WORLD_SIZE, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh_of(shard_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD_SIZE // shard_size, shard_size), mesh_dim_names=(REPLICATE, SHARD))


@pytest.mark.parametrize(
    ("name", "lora"), [*((name, None) for name in TRUE), ("cosmos 2B", LoraConfig(r=4, target_modules=("to_q",)))]
)
def test_true_configurations_are_cut_by_the_rows_of_their_matrices(name: str, lora: LoraConfig | None, all_ranks: None):
    cls, config, shard_size = TRUE[name]
    with torch.device("meta"):
        transformer: nn.Module = cls(**config)
    whole = {key: tuple(p.shape) for key, p in transformer.named_parameters()}
    weights = prepare(
        transformer, lora, reference=False, shard=lambda module: sharding.shard(module, mesh_of(shard_size), None)
    )
    total = sum(map(math.prod, whole.values()))
    shards = weights.shards
    # Every block, and the root.
    assert sum(isinstance(module, FSDPModule) for module in transformer.modules()) == config["num_layers"] + 1 + (
        name == "wan 14B"  # its embedding of the timestep, gathered in float32
    )
    assert shards.index == shard_size - 2
    assert set(shards.shapes) <= whole.keys()
    cut = {key.replace(".base_layer.", "."): p for key, p in transformer.named_parameters() if isinstance(p, DTensor)}
    assert cut.keys() == shards.shapes.keys()
    assert all(tuple(p.shape) == whole[key] for key, p in cut.items())
    # What every rank has whole is small, and what it has of the rest is its share.
    assert sum(math.prod(whole[key]) for key in cut) > 0.999 * total
    here = sum(p.to_local().numel() for p in cut.values())
    assert here == pytest.approx(total / shard_size, rel=0.01)
    for key, p in cut.items():
        assert p.to_local().shape == (shards.rows(whole[key][0])[1], *whole[key][1:])
    trained = {key: tuple(p.shape) for key, p in weights.parameters.items()}
    if lora is None:
        assert trained.keys() == whole.keys()
        assert all(trained[key][0] == shards.rows(whole[key][0])[1] for key in cut)
    else:
        assert all(".lora_" in key and key not in cut for key in trained)
