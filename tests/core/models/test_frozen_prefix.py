"""Text embeddings of Cosmos-Predict2.5 that have been through its projection already, in the place of those before."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, given_frames, stack
from cosmos_rl_core.models._loading import COMPONENTS, PREFIX
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos_predict2_5
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights.policy_weights import prepare

CPU = torch.device("cpu")
LENGTH = 200
PROMPTS = ["a red cube, 3 balls.", "", "a blue one"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_pipelines.save("cosmos_predict2_5", tmp_path_factory.mktemp("prefix") / "base"))


@pytest.fixture(scope="module")
def model(folder: str) -> cosmos_predict2_5.CosmosPredict25:
    return cosmos_predict2_5.load(folder, COMPONENTS, CPU)


@pytest.fixture(scope="module")
def raw(model: cosmos_predict2_5.CosmosPredict25) -> list[Conditioning]:
    return model.encode_prompts(PROMPTS, LENGTH)


@pytest.fixture(scope="module")
def projected(folder: str) -> list[Conditioning]:
    """By the text encoder and the projection alone."""
    return cosmos_predict2_5.load(folder, ("text", PREFIX), CPU).encode_prompts(PROMPTS, LENGTH)


def inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(batch)
    x_t = torch.randn(batch, 4, 3, 4, 4, generator=generator, device=CPU)
    return x_t, torch.linspace(0.2, 0.9, batch, device=CPU)


def test_stored_embeddings_are_the_transformers_projection_in_float32(model, raw, projected):
    projection = model.transformer.get_submodule("crossattn_proj")
    for before, after in zip(raw, projected, strict=True):
        (embeds,) = after.values()
        assert (embeds.shape, embeds.dtype) == ((LENGTH, 16), torch.float32)
        assert torch.equal(embeds, projection(before["prompt_embeds"][None])[0])
        assert before.keys().isdisjoint(after.keys())


def test_nothing_else_of_the_transformer_is_read(folder, projected, tmp_path):
    """Its file may as well hold nothing else, and no VAE be there."""
    lean = tmp_path / "lean"
    shutil.copytree(folder, lean, ignore=shutil.ignore_patterns(directories.WEIGHTS))
    weights = load_file(Path(folder, directories.TRANSFORMER, directories.WEIGHTS))
    prefix = {name: tensor for name, tensor in weights.items() if name.startswith("crossattn_proj.")}
    assert len(prefix) < len(weights)
    save_file(prefix, lean / directories.TRANSFORMER / directories.WEIGHTS)
    (found,) = cosmos_predict2_5.load(str(lean), ("text", PREFIX), CPU).encode_prompts(PROMPTS[:1], LENGTH)
    assert torch.equal(*(texts["projected_prompt_embeds"] for texts in (found, projected[0])))


@torch.no_grad()
def test_velocities_from_raw_and_projected_embeddings_have_the_same_bits(model, raw, projected):
    (x_t, t), given = inputs(1), given_frames(inputs(1)[0][0, :, :1], 3)
    expected, found, again = (
        guided_velocity(model, x_t, t, stack([own | given], CPU), stack([negative], CPU), 3.0)
        for own, negative in (raw[:2], projected[:2], raw[:2])
    )
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)
    other = guided_velocity(model, x_t, t, stack([projected[2] | given], CPU), stack([projected[1]], CPU), 3.0)
    assert (other - expected).abs().max() > 1e-3


@torch.no_grad()
def test_batches_differ_by_rounding_alone_because_prompts_were_projected_one_by_one(model, raw, projected):
    expected, found = (model.velocity(*inputs(3), stack(texts, CPU)) for texts in (raw, projected))
    assert (found - expected).abs().max() < 1e-6


@torch.no_grad()
def test_bfloat16_computes_with_embeddings_that_were_stored_in_float32(model, raw, projected):
    exact = model.velocity(*inputs(3), stack(raw, CPU))
    with computes_in("bfloat16", CPU):
        coarse, from_raw = (model.velocity(*inputs(3), stack(texts, CPU)) for texts in (projected, raw))
    assert coarse.dtype == torch.float32
    assert 0 < (coarse - exact).abs().max() < 0.05 * exact.abs().max()
    # The projection itself is not rounded.
    assert (coarse - from_raw).abs().max() > 0


def test_adapters_have_the_same_gradients_from_raw_and_projected_embeddings(folder, raw, projected):
    model = cosmos_predict2_5.load(folder, ("transformer",), CPU)
    weights = prepare(model.transformer, LoraConfig(r=2, target_modules=("to_q", "to_v")), reference=False)
    shapes = {name: parameter.shape for name, parameter in weights.parameters.items()}
    weights.load("current", {name: torch.full(shape, 0.1, device=CPU) for name, shape in shapes.items()})
    model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    found: list[dict[str, torch.Tensor]] = []
    for texts in (raw, projected):
        model.velocity(*inputs(1), stack(texts[:1], CPU)).square().sum().backward()
        found.append({name: p.grad.clone() for name, p in weights.parameters.items() if p.grad is not None})
        model.transformer.zero_grad()
    assert found[0].keys() == weights.parameters.keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())
    assert any(gradient.abs().max() > 0 for name, gradient in found[0].items() if "attn2.to_v" in name)


def test_a_projection_that_trains_is_part_of_every_forward_pass(folder, projected):
    model = cosmos_predict2_5.load(folder, ("transformer",), CPU)
    prepare(model.transformer, LoraConfig(r=2, target_modules=("all-linear",)))
    with pytest.raises(AssertionError, match="crossattn_proj is trained"):
        model.velocity(*inputs(1), stack(projected[:1], CPU))
