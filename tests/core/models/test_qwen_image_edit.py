"""Qwen-Image-Edit Plus, in addition to the tests of every model with references."""

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, LENGTH, PICTURES, PROMPTS, SCHEDULERS, SIZE, fed_to
from cosmos_rl_core.conformance.models.references.referring import Referring, load_referring
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import qwen_image_edit
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.models.qwen_image_edit import text_size, vae_size
from cosmos_rl_core.pipelines import checkpoints, sizes

REAL_PIXELS = 1024 * 1024


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Referring:
    return load_referring("qwen_image_edit", tmp_path_factory.mktemp("edits"))


@pytest.fixture(scope="module")
def timeless(tmp_path_factory: pytest.TempPathFactory) -> Referring:
    """A pipeline whose transformer is told that references are free of noise."""
    return load_referring("qwen_image_edit", tmp_path_factory.mktemp("timeless"), zero_cond_t=True)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_references_without_noise_equal_the_stock_pipelines(
    timeless: Referring, guidance_scale: float, monkeypatch: pytest.MonkeyPatch, record_property
):
    checkpoints.check(timeless.family.folder)
    monkeypatch.setattr(timeless.stock, "scheduler", SCHEDULERS["euler"]())
    for count in (1, 2):
        expected = timeless.run_stock(PROMPTS[0], PICTURES[:count], SIZE, guidance_scale, 5)
        found = timeless.sample(PROMPTS[0], PICTURES[:count], SIZE, guidance_scale, 5)
        drift = float((found - expected).abs().max())
        record_property(f"drift of {count}", drift)
        assert drift < 1e-4


@torch.no_grad()
def test_a_batch_of_references_without_noise_is_each_alone(timeless: Referring):
    noise = torch.cat([timeless.noise(SIZE), timeless.noise(SIZE).flip(1)])
    t, model = torch.tensor([0.3, 0.9]), timeless.family.model
    encoded = [timeless.encoded(prompt, PICTURES) for prompt in PROMPTS]
    together = model.velocity(noise, t, stack(encoded, CPU))
    for i, own in enumerate(encoded):
        alone = model.velocity(noise[i : i + 1], t[i : i + 1], stack([own], CPU))
        assert (alone[0] - together[i]).abs().max() < 1e-5


@pytest.mark.slow
def test_pictures_of_the_real_size_are_encoded_as_the_stock_pipeline_does(
    edits: Referring, monkeypatch: pytest.MonkeyPatch, record_property
):
    """A small picture is scaled up to about 1024 x 1024 pixels."""
    monkeypatch.setattr(qwen_image_edit, "VAE_PIXELS", REAL_PIXELS)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", REAL_PIXELS)
    monkeypatch.setattr(edits.stock, "scheduler", SCHEDULERS["euler"]())
    assert sizes.reference_tokens(edits.family.folder, [(75, 131)]) == ((1, 24, 42),)
    expected = edits.run_stock("a", PICTURES[:1], SIZE, 1.0, 2)
    drift = float((edits.sample("a", PICTURES[:1], SIZE, 1.0, 2) - expected).abs().max())
    record_property("drift", drift)
    assert drift < 1e-4


@pytest.mark.parametrize("size", [(1, 200), (75, 131), (384, 384), (1000, 1001), (1500, 1100), (4000, 500), (130, 70)])
def test_pictures_are_scaled_to_the_sizes_of_the_stock_pipeline(size: tuple[int, int]):
    height, width = size
    for found, pixels in ((text_size(size), 384 * 384), (vae_size(size), qwen_image_edit.VAE_PIXELS)):
        assert found == calculate_dimensions(pixels, width / height)[::-1]


def test_a_picture_that_the_text_encoder_does_not_take_is_refused(edits: Referring):
    picture = np.zeros((1, 1, 300, 3), np.uint8)
    refused = pytest.raises(ConfigError, match=r"1 x 300 pixels .* at most 200 times the shorter; crop it")
    with refused:
        sizes.reference_tokens(edits.family.folder, [(1, 300)])
    with refused:
        edits.encoded("a", [picture])


def test_texts_longer_than_the_recipe_says_are_refused_where_stock_cuts_none_off(
    edits: Referring,
):
    """Tokens of pictures count."""
    model, most = edits.family.model, {}
    for count in (1, 2):
        most[count] = len(edits.encoded("a red cube", PICTURES[:count])["prompt_embeds"])
        assert model.encode_with("a red cube", PICTURES[:count], most[count], SIZE, 1).own
        with pytest.raises(ConfigError, match=rf"has {most[count]} tokens with its {count} references, .*cuts nothing"):
            model.encode_with("a red cube", PICTURES[:count], most[count] - 1, SIZE, 1)
    assert most[2] - most[1] >= 8


def test_the_negative_prompt_is_read_with_the_pictures_too(edits: Referring, monkeypatch: pytest.MonkeyPatch):
    """Each bit is the stock pipeline's."""
    monkeypatch.setattr(edits.stock, "scheduler", SCHEDULERS["euler"]())
    with fed_to(edits.stock.transformer) as fed:
        edits.run_stock(PROMPTS[0], PICTURES, SIZE, 3.0, 1)
    prompt, negative = edits.encoded(PROMPTS[0], PICTURES), edits.negative(PICTURES)
    for call, own in zip(fed, (prompt, negative), strict=True):
        assert torch.equal(call["texts"][0], own["prompt_embeds"])
    other = edits.negative(PICTURES[:1])
    assert len(other["prompt_embeds"]) < len(negative["prompt_embeds"])


def test_only_the_component_of_texts_has_a_processor(edits: Referring):
    assert load_model(edits.family.folder, ("vae", "transformer"), CPU).pipeline.processor is None
    model = load_model(edits.family.folder, ("text",), CPU)
    assert model.pipeline.processor is not None
    assert model.pipeline.vae is None
    with_text = model.encode_negative_with("", PICTURES[:1], LENGTH)
    assert torch.equal(with_text["prompt_embeds"], edits.negative(PICTURES[:1])["prompt_embeds"])
