"""Memory of passes that is counted without numbers, against the tensors of the same passes with numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import PICTURES, SIZE, Family
from cosmos_rl_core.footprint import counter
from cosmos_rl_core.footprint.live import LiveBytes
from cosmos_rl_core.footprint.passes import Pass
from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.parallel.precision import computes_in
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights.policy_weights import prepare

CPU = torch.device("cpu")
BATCH, LENGTH = 3, 8
LORA = LoraConfig(r=2, target_modules=("to_q", "to_v"))


def pictures_of(path: str) -> tuple[tuple[int, ...], ...]:
    """Sizes of as many references of a prompt as there are, if the family takes any."""
    references = directories.spec(path).references
    return tuple(one.shape[1:3] for one in PICTURES[: references.most]) if references else ()


def pass_of(path: str, frames: int, **settings: Any) -> Pass:
    media = {"size": SIZE, "frames": frames, "batch": BATCH}
    return Pass(**media | {"max_prompt_length": LENGTH, "pictures": pictures_of(path)} | settings)


def counted(path: str, frames: int, **settings: Any) -> int:
    return counter.footprint(path, pass_of(path, frames, **settings))["peak_bytes"]


def near(found: int, expected: int, module: nn.Module) -> bool:
    return expected <= found <= expected * 1.001 + table_bytes(module)


def table_bytes(module: nn.Module) -> int:
    """Return the bytes of tables of positions, which are neither weights nor buffers.

    They are counted, and a second micro-batch on a CPU does not make them. They are attributes of modules, or of plain
    objects that are attributes of modules.
    """
    held = [value for part in module.modules() for value in vars(part).values()]
    held += [vars(value) for value in held if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)]
    tensors = [leaf for value in held for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return sum({id(tensor): tensor.nbytes for tensor in tensors if id(tensor) not in known}.values())


def conditioning(path: str, frames: int) -> Conditioning:
    """Texts and references of the counted shapes, of which every token counts."""
    one = pass_of(path, frames, kind="forward")
    return counter.conditioning(path, one).each(lambda tensor: torch.ones_like(tensor))


def inputs(model: Model, frames: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(BATCH, *model.latent_shape(SIZE, frames)), torch.full((BATCH,), 0.5)


def live(model: Model, path: str, frames: int, *, trains: bool, half: bool, guided: bool, lora: LoraConfig | None):
    """The most bytes of real tensors in a second micro-batch, and its gradients."""
    if trains:
        prepare(model.transformer, lora, reference=False)
    x_t, t = inputs(model, frames)
    prompts = conditioning(path, frames)
    negative, scale = (conditioning(path, frames), counter.SCALE) if guided else (None, 1.0)

    def run() -> None:
        with torch.set_grad_enabled(trains):
            with computes_in("bfloat16" if half else "float32", CPU):
                velocity = guided_velocity(model, x_t, t, prompts, negative, scale)
            if trains:
                velocity.square().mean().backward()

    run()
    gradients = {name: p.grad.clone() for name, p in model.transformer.named_parameters() if p.grad is not None}
    own = [*model.transformer.parameters(), *model.transformer.buffers()]
    own += [p.grad for p in model.transformer.parameters() if p.grad is not None]
    with LiveBytes(own) as found:
        run()
    return found.peak, gradients


def loaded(family: Family, checkpointing: bool = False) -> Model:
    model = load_model(family.folder, ("transformer",), CPU)
    if checkpointing:
        model.transformer.enable_gradient_checkpointing()  # pyright: ignore[reportCallIssue]
    return model


@pytest.mark.parametrize(
    ("lora", "half", "checkpointing"),
    [(LORA, True, False), (None, True, True), (None, False, False)],
    ids=["lora-bfloat16-kept", "full-bfloat16-recomputed", "full-float32-kept"],
)
def test_training_takes_the_memory_that_is_counted(
    family: Family, lora: LoraConfig | None, half: bool, checkpointing: bool
):
    settings = {"half": half, "lora": lora}
    found = counted(family.folder, family.frames, kind="training", checkpointing=checkpointing, **settings)
    model = loaded(family, checkpointing)
    expected, _ = live(model, family.folder, family.frames, trains=True, guided=False, **settings)
    assert near(found, expected, model.transformer)


@pytest.mark.parametrize("guided", [False, True], ids=["alone", "guided"])
def test_a_forward_pass_takes_the_memory_that_is_counted(family: Family, guided: bool):
    found = counted(family.folder, family.frames, kind="forward", half=True, guided=guided)
    settings = {"trains": False, "half": True, "guided": guided, "lora": None}
    model = loaded(family)
    expected, _ = live(model, family.folder, family.frames, **settings)
    assert near(found, expected, model.transformer)


@pytest.mark.parametrize("kind", ["decoding", "encoding"])
def test_the_vae_takes_the_memory_that_is_counted(family: Family, kind: str):
    model = load_model(family.folder, ("vae",), CPU)
    latents, _ = inputs(model, family.frames)
    pixels = torch.zeros(BATCH, family.frames, *SIZE, 3, dtype=torch.uint8)
    vae = model.pipeline.vae
    with LiveBytes([*vae.parameters(), *vae.buffers()]) as found:
        model.decode(latents) if kind == "decoding" else model.encode_media(pixels)
    assert near(counted(family.folder, family.frames, kind=kind), found.peak, vae)


def test_gradients_have_the_same_bits_with_and_without_recomputation(family: Family):
    kept, recomputed = (
        live(loaded(family, again), family.folder, family.frames, trains=True, half=True, guided=False, lora=None)
        for again in (False, True)
    )
    assert recomputed[0] < kept[0]
    assert kept[1].keys() == recomputed[1].keys()
    assert all(torch.equal(gradient, recomputed[1][name]) for name, gradient in kept[1].items())


def test_memory_counts_while_a_tensor_lives_and_views_share_it():
    weight = torch.ones(256, 4)
    with LiveBytes([weight]) as found:
        cast = weight.to(torch.bfloat16)
        product = weight * 2
        view = product[:10]
        assert found.now == weight.nbytes
        second = product + 1
        assert found.now == 2 * weight.nbytes
        del product
        assert found.now == 2 * weight.nbytes
        del view
        assert found.now == weight.nbytes
    assert found.peak == 2 * weight.nbytes
    assert cast.shape == second.shape
