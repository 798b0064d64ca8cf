"""What a plan counts of memory, against the classes of diffusers; and plans of models too large to load here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos
from torch import nn

from cosmos_rl_core.config.parallelism import Parallelism
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.families import Family, as_torchvision
from cosmos_rl_core.pipelines import directories, memory
from cosmos_rl_core.pipelines.memory import Bytes, Spread
from cosmos_rl_core.recipes.reading import check, read_values
from cosmos_rl_core.storage.tensor_headers import header_bytes
from cosmos_rl_core.weights.policy_weights import prepare
from cosmos_rl_core.weights.shapes import embedding_elements, trainable_shapes, weight_shapes
from flows.sizes import memory as stages_memory
from stages.formats.members import KEPT_BYTES

LORA = LoraConfig(r=2)
UNPADDED = ("qwen_image", "qwen_image_edit", "z_image")
"""Models whose prompts have the tokens of their text alone; a plan counts the most that they may have."""
TWO = Parallelism(world_size=2, dp_shard_size=2)


def test_matrices_and_embeddings_are_the_models(family: Family):
    matrices = {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in family.model.transformer.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    shapes = weight_shapes(family.folder)
    assert {name: shape for name, shape in shapes.items() if memory.is_matrix(name, shape)} == matrices
    embedded = sum(tensor[0].numel() for name, tensor in family.conditioning.own.items() if "mask" not in name)
    planned = embedding_elements(family.folder, family.length)
    assert embedded < planned if directories.adapter_name(family.folder) in UNPADDED else embedded == planned


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_the_shapes_of_trained_tensors_are_the_planned_ones(family: Family, lora: LoraConfig | None):
    weights = prepare(family.load("transformer").transformer, lora, reference=False)
    trained = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
    assert trainable_shapes(weight_shapes(family.folder), lora) == trained


def test_matrices_are_cut_by_rows_and_everything_else_is_whole():
    shapes = {"blocks.0.to_q.weight": (5, 3), "blocks.0.to_q.bias": (5,), "to_q.lora_A.weight": (2, 3), "table": (4, 4)}
    whole = 5 + 6 + 16
    assert memory.resting(shapes, Spread()) == Bytes(4 * (whole + 15))
    # The first of two ranks has three of five rows.
    assert memory.resting(shapes, Spread(TWO)) == Bytes(4 * (whole + 9))
    assert memory.resting(shapes, Spread(replace(TWO, fsdp_offload=True))) == Bytes(4 * whole, 4 * 9)


def test_memory_that_visits_is_the_root_and_two_blocks_or_the_casts():
    blocks = {"blocks.0.a.weight": (10, 10), "blocks.1.a.weight": (20, 10), "blocks.2.a.weight": (10, 10)}
    shapes = blocks | {"proj.weight": (3, 10), "norm.weight": (9,)}

    def visiting(spread: Spread, backward: bool = True, all_train: bool = True, checkpointing: bool = False) -> int:
        return memory.visiting(shapes, spread, backward=backward, all_train=all_train, checkpointing=checkpointing)

    assert visiting(Spread(TWO), all_train=False) == 4 * 430
    assert visiting(Spread(TWO, half=True), backward=False) == 2 * 430
    assert visiting(Spread(TWO, half=True)) == 2 * 430 + 4 * 230
    assert visiting(Spread()) == 0
    assert visiting(Spread(half=True), checkpointing=True) == 2 * 430
    assert visiting(Spread(half=True), all_train=False) == 2 * 400
    assert visiting(Spread(half=True), all_train=False, checkpointing=True) == 2 * 200


def cosmos_of(folder: Path, num_layers: int, num_heads: int) -> Path:
    """A pipeline directory of the real settings whose weights are headers without tensors."""
    settings: dict[str, Any] = {
        "in_channels": 17, "out_channels": 16, "num_attention_heads": num_heads, "attention_head_dim": 128,
        "num_layers": num_layers, "text_embed_dim": 1024, "adaln_lora_dim": 256, "max_size": (128, 240, 240),
        "patch_size": (1, 2, 2), "rope_scale": (1.0, 3.0, 3.0), "extra_pos_embed_type": None,
        "use_crossattn_projection": True, "crossattn_proj_in_channels": 100352, "encoder_hidden_states_channels": 1024,
    }  # fmt: skip
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in CosmosTransformer3DModel(**settings).named_parameters()}
    files = {
        "model_index.json": {"_class_name": "Cosmos2_5_PredictBasePipeline", "text_encoder": ["transformers", "Qwen"]},
        "transformer/config.json": settings | {"_class_name": "CosmosTransformer3DModel"},
        "vae/config.json": {
            "_class_name": "AutoencoderKLWan", "z_dim": 16, "scale_factor_spatial": 8, "scale_factor_temporal": 4,
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "transformer" / directories.WEIGHTS).write_bytes(
        header_bytes(((name, "F32", tuple(shape)) for name, shape in shapes.items()), {})
    )
    for name in ("text_encoder", "vae"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "model.safetensors").write_bytes(header_bytes((("weight", "F32", (1,)),), {}))
    return folder


@pytest.mark.parametrize(
    ("path", "layers", "heads", "parameters"),
    [("configs/ddrl/2b.toml", 28, 16, 2_059_174_912), ("configs/ddrl/14b.toml", 36, 40, 14_368_047_104)],
)
def test_the_real_cosmos_models_are_planned_from_the_headers_of_their_weights(
    path: str, layers: int, heads: int, parameters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if not hasattr(transformer_cosmos, "transforms"):
        monkeypatch.setattr(transformer_cosmos, "transforms", as_torchvision().transforms, raising=False)
    folder = cosmos_of(tmp_path / "base", layers, heads)
    shared = ("launch.processes=8", "launch.dp_shard_size=8", "train.param_dtype=bfloat16")

    judged = ("validation.batch_size=1", "validation.dataset.name=prompts", "validation.dataset.path=held_out.txt")

    def planned(stage: str, *overrides: str) -> stages_memory.StageMemory:
        recipe = check(read_values(path, [f"policy.model_name_or_path={folder}", *overrides]), path)
        (found,) = stages_memory.stages(recipe, [stage])
        return found

    alone, spread, offloaded = (
        planned("update", *more) for more in ((), shared, (*shared, "launch.fsdp_offload=true"))
    )
    # Weights, gradients and two moments in float32, and the copies; nothing else is as large.
    kinds = {"transformer": 1, "gradients": 1, "optimizer": 2, "ema": 1, "behaviour": 1}
    assert {kind: alone.rows.get(kind) for kind in kinds} == {k: Bytes(4 * parameters) * n for k, n in kinds.items()}
    for kind, times in kinds.items():
        mine, rests = spread.rows[kind], offloaded.rows[kind]
        assert mine.device == pytest.approx(4 * parameters * times / 8, rel=0.01)
        assert rests.device + rests.cpu == mine.device
        assert rests.cpu > 0.98 * mine.device
    # Of the samples, of which one alone is more, a rank keeps what it read last.
    assert spread.rows["samples"] == Bytes(cpu=KEPT_BYTES)
    # A rank has all of the transformer to evaluate it; everything but matrices is float32, and next to nothing.
    evaluated, exported = planned("evaluate", *shared, *judged), planned("export", *shared)
    assert evaluated.rows["transformer"].device == pytest.approx(2 * parameters, rel=0.01)
    assert exported.ranks == 1
    assert exported.peak.device == 0
    assert exported.peak.cpu < 2**30
