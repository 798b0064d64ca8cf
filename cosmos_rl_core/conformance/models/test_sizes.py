"""Sizes, tokens and weights of every model plugin: plan and transformer agree on them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cosmos_rl_core import plugins
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import SIZE, Family
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.pipelines import directories, sizes
from cosmos_rl_core.weights.counter import FullTexts
from cosmos_rl_core.weights.policy_weights import prepare
from cosmos_rl_core.weights.shapes import trainable_elements, weight_shapes

LORA = LoraConfig(r=4, lora_alpha=12.0)


def possible_sizes(model: Model, folder: str) -> dict[tuple[tuple[int, int], int], tuple[int, ...]]:
    """Return shapes of latents by the size and frames that the model takes; a plan refuses and counts the same."""
    found, odd = {}, ((16, 48), (36, 33), (8, 16), (64, 4096))
    for size, frames in [*((SIZE, n) for n in (1, 2, 5, 8, 9, 13)), *((size, n) for size in odd for n in (1, 5))]:
        try:
            channels, *shape = found[size, frames] = model.latent_shape(size, frames)
        except ConfigError:
            with pytest.raises(ConfigError, match=r"inference_size|train_frames"):
                sizes.latent_shape(folder, size, frames)
        else:
            assert sizes.latent_shape(folder, size, frames) == (channels, *[1] * (3 - len(shape)), *shape)
    return found


def test_a_plan_refuses_the_sizes_that_the_model_refuses(family: Family):
    assert (SIZE, family.frames) in possible_sizes(family.model, family.folder)


@pytest.mark.parametrize("patch", [(1, 1, 1), (2, 2, 2), (1, 4, 1)])
def test_a_plan_knows_the_sizes_and_tokens_of_other_patches_too(
    family: Family, patch: tuple[int, int, int], tmp_path: Path
):
    shutil.copytree(family.folder, tmp_path / "pipeline", copy_function=os.symlink)
    folder, file = str(tmp_path / "pipeline"), tmp_path / "pipeline/transformer/config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    spec = directories.spec(family.folder)
    settings = directories.settings(family.folder, "transformer")
    if spec.packing > 1 or spec.patch({**settings, "patch_size": 3}) == spec.patch(settings):
        pytest.skip("the pipeline cuts tokens, of one size, and not the transformer")
    alone = spec.max_given_frames > 0  # each latent frame has a noise level of its own
    config["patch_size"] = patch[1] if family.frames == 1 else (1, *patch[1:]) if alone else patch
    file.unlink()
    file.write_text(json.dumps(config), encoding="utf-8")
    model = load_model(folder, (EMPTY_TRANSFORMER,), family.device)
    (size, frames), shape = next(iter(possible_sizes(model, folder).items()))
    assert sizes.num_tokens(folder, size, frames) in tokens_of(model, shape, family.conditioning)


@pytest.mark.parametrize("grows", ["frames", "height", "width"])
def test_a_plan_refuses_just_the_sizes_that_the_transformer_has_no_positions_for(family: Family, grows: str):
    """The largest size that a plan permits runs; the next one fails in the transformer, too."""
    model = family.load("transformer")

    def latents(times: int) -> tuple[int, ...]:
        frames = 4 * times - 3 if grows == "frames" else family.frames
        sides = [32 * times if grows == side else 32 for side in ("height", "width")]
        return model.latent_shape((sides[0], sides[1]), frames)

    axis, shape = ("frames", "height", "width").index(grows) - 3, ()
    for times in range(1, 40):
        try:
            shape = latents(times)
        except ConfigError as error:
            if "positions" not in str(error):
                return  # images have no frames
            break
    else:
        config = directories.settings(family.folder, "transformer")
        assert directories.spec(family.folder).positions(config) is None
        return
    assert tokens_of(model, shape, family.conditioning)
    step = shape[axis] // (times - 1)
    beyond = tuple(n + step if i == len(shape) + axis else n for i, n in enumerate(shape))
    try:
        # With values: on the meta device some tables of positions can be read out of bounds.
        tokens_of(family.load("transformer"), beyond, family.conditioning, device="cpu")
    except NotImplementedError:
        raise  # values were asked of the meta device
    except (RuntimeError, ValueError, IndexError):
        return
    assert family.name not in plugins.own("models")
    pytest.skip("the transformer takes positions of other rows there, and does not stop as the plan does")


@torch.no_grad()
def tokens_of(model: Model, shape: tuple[int, ...], conditioning: Conditioning, device: str = "meta") -> set[int]:
    """Return the numbers of tokens that the first blocks of the transformer get: of media, maybe of texts or of both.

    The weights need no values.
    """
    transformer, given = model.transformer.to("meta").to_empty(device=device), set()

    def note(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given.update((*arguments, *named.values())[0].shape[1:2])

    for blocks in transformer.children():
        if isinstance(blocks, nn.ModuleList) and len(blocks):
            blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    entries = {}
    if (references := directories.spec(model._path).references) and references.fewest:
        entries = references.entries(directories.settings(model._path, "transformer"), shape)
    shared = {name: torch.zeros(2, *entry, device=device) for name, entry in entries.items()}
    own = conditioning.each(lambda value: value.to(device)).own
    with FullTexts(conditioning["prompt_embeds"].shape[1]):
        model.velocity(torch.empty(2, *shape, device=device), torch.zeros(2, device=device), Conditioning(own, shared))
    return given


def test_a_plan_knows_how_much_lora_trains(family: Family):
    weights = prepare(family.load("transformer").transformer, LORA, reference=False)
    shapes = weight_shapes(family.folder)
    assert trainable_elements(shapes, LORA) == sum(p.numel() for p in weights.parameters.values())
    assert trainable_elements(shapes, None) == sum(p.numel() for p in family.model.transformer.parameters())
