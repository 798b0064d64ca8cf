"""Sequences shared by two and by four gloo processes, against the same transformers in one process."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CosmosTransformer3DModel, WanTransformer3DModel

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import sd3, wan
from cosmos_rl_core.parallel import sequence_shares
from tests.core.sequence_peers import cases, share, share_compiled
from tests.stages.ranks import start_ranks

HEADS = 5
"""Attention heads of the tiny transformers: neither two nor four peers can share them evenly."""
CASES = [f"{name}, {num_peers} peers" for num_peers in (2, 4) for name, _ in cases(Path(), num_peers)]
WAN = {"num_attention_heads": 12, "patch_size": [1, 2, 2]}

# The processes of this module are started once, on one of pytest's workers.
pytestmark = [pytest.mark.xdist_group("sequence peers"), pytest.mark.processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny pipelines are."""
    folder = tmp_path_factory.mktemp("peers")
    kinds: Any = (
        (WanTransformer3DModel, tiny_pipelines.save("wan", folder / "wan")),
        (CosmosTransformer3DModel, tiny_pipelines.save("cosmos_predict2_5", folder / "cosmos")),
    )
    for cls, path in kinds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            settings = json.loads((path / "transformer" / "config.json").read_text(encoding="utf-8"))
            cls.from_config(settings | {"num_attention_heads": HEADS}).save_pretrained(path / "transformer")
    return folder


@pytest.fixture(scope="module")
def of_ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    start_ranks(partial(share, folder), folder, ranks=4, timeout_s=120)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.fixture(scope="module")
def found(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """How far each case is from what one process computes."""
    return {name: result for of_rank in of_ranks for name, result in of_rank.items() if name != "refusals"}


def require_the_same(result: dict[str, Any], largest_output: float, largest_gradient: float) -> None:
    assert result["output"] < largest_output
    assert {name: error for name, error in result["gradients"].items() if not error < largest_gradient} == {}
    assert result["missing"] == []
    assert result["agree"]


@pytest.mark.parametrize("case", CASES)
def test_peers_compute_what_one_process_computes(found: dict[str, Any], case: str):
    """Most outputs are equal bit for bit; else, a matrix product of fewer rows rounds otherwise.

    Measured, as parts of the largest value: outputs at most 7e-7 off, summed gradients of any parameter or input 4e-6.
    Under autocast 0.003 and 0.043, where one process is itself 0.02 and 0.08 off its float32.
    """
    require_the_same(found[case], *((0.01, 0.1) if "autocast" in case else (3e-6, 2e-5)))


@pytest.mark.slow
def test_compiled_blocks_of_peers_compute_what_one_process_computes(folder: Path, tmp_path: Path):
    (tmp_path / "wan").symlink_to(folder / "wan")
    (tmp_path / "cosmos").symlink_to(folder / "cosmos")
    start_ranks(partial(share_compiled, tmp_path), tmp_path, ranks=2, timeout_s=300)
    results = json.loads((tmp_path / "0.json").read_text(encoding="utf-8"))
    assert len(results) == 2
    for result in results.values():
        require_the_same(result, 3e-6, 2e-5)


def test_every_parameter_is_compared(found: dict[str, Any]):
    """Also parameters that embed patches, text and time, which each peer computes in full."""
    gradients = found["wan full, 2 peers"]["gradients"]
    for part in ("patch_embedding", "time_embedder", "time_proj", "text_embedder", "attn1", "attn2", "ffn", "proj_out"):
        assert any(part in name for name in gradients)
    lora = found["cosmos lora, 4 peers"]["gradients"]
    for part in ("time_embed", "attn1.to_q", "attn2.to_k", "norm_out", "proj_out"):
        assert any(part in name and "lora_A" in name for name in lora)


def test_mistakes_are_named_with_their_numbers(of_ranks: list[dict[str, Any]]):
    assert [of_rank["refusals"] for of_rank in of_ranks] == [
        {
            "heads": "ConfigError: 2 attention heads cannot be shared by 4 context-parallel peers; at most 2",
            "tokens": "ConfigError: 3 tokens cannot be shared by 4 context-parallel peers; at most 3",
            "late lora": "RuntimeError: proj_out was replaced after the split: add LoRA first, then split",
        }
    ] * 4


@pytest.mark.parametrize(
    ("count", "num_peers", "expected"), [(10, 4, [3, 3, 2, 2]), (12, 4, [3] * 4), (5, 2, [3, 2]), (3, 3, [1, 1, 1])]
)
def test_shares_differ_by_at_most_one(count: int, num_peers: int, expected: list[int]):
    assert sequence_shares.shares("tokens", count, num_peers) == expected


def test_a_plan_knows_which_models_cannot_share_a_video():
    sequence_shares.check(wan.SPEC, WAN, (16, 21, 60, 104), 8)
    with pytest.raises(ConfigError, match="12 attention heads cannot be shared by 16 context-parallel peers"):
        sequence_shares.check(wan.SPEC, WAN, (16, 21, 60, 104), 16)
    # 2 frames of 1 x 2 patches.
    with pytest.raises(ConfigError, match="4 tokens cannot be shared by 8 context-parallel peers; at most 4"):
        sequence_shares.check(wan.SPEC, WAN, (16, 2, 2, 4), 8)
    with pytest.raises(ConfigError, match="no context parallelism for SD3Transformer2DModel"):
        sequence_shares.check(sd3.SPEC, {}, (16, 1, 128, 128), 2)
