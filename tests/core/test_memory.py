"""What a plan says of activations, against tensors that live at once; and plans of models too large to load here."""

import json
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from diffusers.models.transformers import transformer_cosmos
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.recipe import check, read_values
from cosmos_rl_core.models._base import Conditioning, Model
from cosmos_rl_core.parallel.parallelism import Parallelism
from cosmos_rl_core.pipelines import directories, memory, sizes
from cosmos_rl_core.pipelines.memory import Bytes, Spread, Tokens
from cosmos_rl_core.storage.tensor_headers import header_bytes
from cosmos_rl_core.weights.policy_weights import prepare
from flows.planning import memory as stages_memory
from stages.formats.members import KEPT_BYTES
from tests.families import CPU, LENGTH, Family, as_torchvision

FACTOR = 1.7
"""How far off an estimate may be."""
TEXT, SIZE = 8, (64, 64)
LORA = LoraConfig(r=2)
TWO = Parallelism(world_size=2, dp_shard_size=2)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within it, and most of them at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.counted: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in storages((args, kwargs)):
            # What was there before.
            self.counted.setdefault(storage._cdata, 0)
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in self.counted:
                self.counted[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self.forget, storage._cdata)
        return out

    def forget(self, key: int) -> None:
        self.bytes -= self.counted.pop(key, 0)


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def peak(model: Model, shape: tuple[int, ...], conditioning: Conditioning, *, half: bool, trains: bool) -> float:
    """Bytes that a sample adds to a forward pass, and the backward pass if it trains."""

    def measured(batch: int) -> int:
        noise = torch.zeros(batch, *shape, device=CPU)
        given = {name: c[:1].repeat(batch, *[1] * (c.ndim - 1)) for name, c in conditioning.items()}
        with Live() as live, torch.set_grad_enabled(trains):
            with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
                velocity = model.velocity(noise, torch.full((batch,), 0.5, device=CPU), given)
            if trains:
                velocity.sum().backward()
        model.transformer.zero_grad(set_to_none=True)
        return live.peak

    # What does not grow with the batch, such as casts of weights and gradients, is none of it.
    return (measured(3) - measured(1)) / 2


def test_matrices_and_embeddings_are_those_of_the_model(family: Family):
    matrices = {
        f"{name}.weight": tuple(module.weight.shape)
        for name, module in family.model.transformer.named_modules()
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    }
    shapes = sizes.weight_shapes(family.folder)
    assert {name: shape for name, shape in shapes.items() if memory.is_matrix(name, shape)} == matrices
    embedded = sum(tensor[0].numel() for name, tensor in family.conditioning.items() if "mask" not in name)
    assert sizes.embedding_elements(family.folder, LENGTH) == embedded


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_work_takes_about_as_much_as_estimated(family: Family, lora: LoraConfig | None):
    model, config = (
        family.load("transformer", "vae"),
        directories.read_json(family.folder, "transformer", "config.json"),
    )
    weights, shapes = prepare(model.transformer, lora, reference=False), sizes.weight_shapes(family.folder)
    trained = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
    assert sizes.trainable_shapes(shapes, lora) == trained
    planned = sizes.latent_shape(family.folder, SIZE, family.frames)
    assert planned is not None
    tokens = Tokens(memory.num_tokens(planned, config), TEXT)
    # Few words, because outside its blocks a transformer of two blocks does not have little to do with them.
    conditioning = {name: c if "pooled" in name else c[:, :TEXT] for name, c in family.conditioning.items()}
    measure = partial(peak, model, model.latent_shape(SIZE, family.frames), conditioning)

    for half in (False, True):
        found = measure(half=half, trains=False) / memory.passing(shapes, config, tokens, half=half)
        assert 1 / FACTOR < found < FACTOR, half
    for checkpointing in (False, True):
        if checkpointing:
            model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
        for half in (False, True):
            options = {"lora": lora is not None, "half": half, "checkpointing": checkpointing}
            estimate = memory.activations(shapes, config, tokens, **options)
            assert 1 / FACTOR < measure(half=half, trains=True) / estimate < FACTOR, options


def test_matrices_are_cut_by_rows_and_everything_else_is_whole():
    shapes = {"blocks.0.to_q.weight": (5, 3), "blocks.0.to_q.bias": (5,), "to_q.lora_A.weight": (2, 3), "table": (4, 4)}
    whole = 5 + 6 + 16
    assert memory.resting(shapes, Spread()) == Bytes(4 * (whole + 15))
    # The first of two ranks has three of five rows.
    assert memory.resting(shapes, Spread(TWO)) == Bytes(4 * (whole + 9))
    assert memory.resting(shapes, Spread(replace(TWO, fsdp_offload=True))) == Bytes(4 * whole, 4 * 9)


def test_what_visits_is_the_root_and_two_blocks_or_the_casts():
    blocks = {"blocks.0.a.weight": (10, 10), "blocks.1.a.weight": (20, 10), "blocks.2.a.weight": (10, 10)}
    shapes = blocks | {"proj.weight": (3, 10), "norm.weight": (9,)}

    def visiting(spread: Spread, **options: bool) -> int:
        return memory.visiting(shapes, spread, **({"backward": True, "all_train": True} | options))

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
        return next(found for found in stages_memory.stages(recipe) if found.stage == stage)

    alone, spread, offloaded = (
        planned("update", *more) for more in ((), shared, (*shared, "launch.fsdp_offload=true"))
    )
    # Weights, gradients and two moments in float32, and the copies; nothing else is as large.
    kinds = {"transformer": 1, "gradients": 1, "optimizer": 2, "ema": 1, "behaviour": 1}
    assert {kind: alone.rows.get(kind) for kind in kinds} == {k: Bytes(4 * parameters) * n for k, n in kinds.items()}
    for kind, times in kinds.items():
        mine, rests = spread.rows[kind], offloaded.rows[kind]
        assert mine is not None
        assert rests is not None
        assert mine.device == pytest.approx(4 * parameters * times / 8, rel=0.01)
        assert rests.device + rests.cpu == mine.device
        assert rests.cpu > 0.98 * mine.device
    # 24 latent frames of 90 x 160, by patches of 2 x 2: the inputs of all blocks, in bfloat16 at least.
    kept, tokens = spread.rows["activations ~"], 24 * (90 // 2) * (160 // 2)
    assert kept is not None
    assert kept.device > 2 * layers * tokens * 128 * heads
    # Of the samples, of which one alone is more, a rank keeps what it read last.
    assert spread.rows["samples"] == Bytes(cpu=KEPT_BYTES)
    # A rank has all of the transformer to evaluate it; everything but matrices is float32, and next to nothing.
    evaluated, exported = planned("evaluate", *shared, *judged), planned("export", *shared)
    assert evaluated.rows["transformer"] is not None
    assert evaluated.rows["transformer"].device == pytest.approx(2 * parameters, rel=0.01)
    assert exported.ranks == 1
    assert exported.peak.device == 0
    assert exported.peak.cpu < 2**30
