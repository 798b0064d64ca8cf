"""Sequences shared by two and by four gloo processes, against the same transformers in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from cosmos_rl_core import context_parallel, sequence_shares
from cosmos_rl_core.errors import ConfigError
from tests.core.sequence_peers import cases

ROOT = Path(__file__).parents[2]
CASES = [f"{name}, {num_peers} peers" for num_peers in (2, 4) for name, _ in cases(Path(), num_peers)]
WAN = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12, "patch_size": [1, 2, 2]}

# The processes of this module are started once, on one of pytest's workers.
pytestmark = pytest.mark.xdist_group("sequence peers")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four processes found."""
    command = [sys.executable, "-m", "tests.core.sequence_peers", str(tmp_path_factory.mktemp("peers"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("case", CASES)
def test_peers_compute_what_one_process_computes(found: list[dict[str, Any]], case: str):
    """Most outputs are equal bit for bit; else, a matrix product of fewer rows rounds otherwise.

    Measured, as parts of the largest value: outputs at most 7e-7 off, summed gradients of any parameter or input 4e-6.
    Under autocast 0.003 and 0.043, where one process is itself 0.02 and 0.08 off its float32.
    """
    largest_output, largest_gradient = (0.01, 0.1) if "autocast" in case else (3e-6, 2e-5)
    for of_peer in found:
        result = of_peer[case]
        assert result["output"] < largest_output
        assert {name: error for name, error in result["gradients"].items() if not error < largest_gradient} == {}
        assert result["missing"] == []
        assert result["agree"]


def test_every_parameter_is_compared(found: list[dict[str, Any]]):
    """Those of embeddings of patches, text and time among them, which each peer computes in full."""
    gradients = found[0]["wan full, 2 peers"]["gradients"]
    for part in ("patch_embedding", "time_embedder", "time_proj", "text_embedder", "attn1", "attn2", "ffn", "proj_out"):
        assert any(part in name for name in gradients)
    lora = found[0]["cosmos lora, 4 peers"]["gradients"]
    for part in ("time_embed", "attn1.to_q", "attn2.to_k", "norm_out", "proj_out"):
        assert any(part in name and "lora_A" in name for name in lora)


def test_mistakes_are_said_with_their_numbers(found: list[dict[str, Any]]):
    assert [of_peer["refusals"] for of_peer in found] == [
        {
            "heads": "ConfigError: 2 attention heads cannot be shared by 4 context-parallel peers; at most 2",
            "tokens": "ConfigError: 3 tokens cannot be shared by 4 context-parallel peers; at most 3",
            "late lora": "RuntimeError: proj_out was replaced after split_sequence: add LoRA first, then split",
        }
    ] * 4


def test_a_transformer_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="no context parallelism for a Linear; there is for CosmosTransformer3DModel"):
        context_parallel.split_sequence(nn.Linear(1, 1), cast("torch.distributed.ProcessGroup", None))


@pytest.mark.parametrize(
    ("count", "num_peers", "expected"), [(10, 4, [3, 3, 2, 2]), (12, 4, [3] * 4), (5, 2, [3, 2]), (3, 3, [1, 1, 1])]
)
def test_shares_differ_by_at_most_one(count: int, num_peers: int, expected: list[int]):
    assert sequence_shares.shares("tokens", count, num_peers) == expected


def test_a_plan_knows_who_cannot_share():
    sequence_shares.check(WAN, (16, 21, 60, 104), 8)
    sequence_shares.check(WAN | {"_class_name": "SD3Transformer2DModel"}, (16, 128, 128), 1)
    with pytest.raises(ConfigError, match="12 attention heads cannot be shared by 16 context-parallel peers"):
        sequence_shares.check(WAN, (16, 21, 60, 104), 16)
    # 2 frames of 1 x 2 patches.
    with pytest.raises(ConfigError, match="4 tokens cannot be shared by 8 context-parallel peers; at most 4"):
        sequence_shares.check(WAN, (16, 2, 2, 4), 8)
    with pytest.raises(ConfigError, match="no context parallelism for a SD3Transformer2DModel"):
        sequence_shares.check(WAN | {"_class_name": "SD3Transformer2DModel"}, (16, 128, 128), 2)


def test_what_plans_know_and_what_can_be_split_are_the_same_transformers():
    known = sorted(kind.__name__ for kind in context_parallel._SPLITS)
    assert known == sorted(sequence_shares.TRANSFORMERS)
