from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from cosmos_rl_core.datasets import rendered_text as rendered
from cosmos_rl_core.tiny.__main__ import main
from cosmos_rl_core.tiny.sd3 import build_sd3, build_vae
from cosmos_rl_core.tiny.vae import first_frames, store_latent_scale, train_vae

PROMPT = 'a sign that says "K7"'


@pytest.fixture(scope="module")
def sd3():
    return build_sd3(0)


def generate(pipe, prompt=PROMPT, **arguments):
    pipe.set_progress_bar_config(disable=True)
    noise_source = torch.Generator(device="cpu").manual_seed(1)
    arguments |= {"guidance_scale": 1.0, "max_sequence_length": 12, "num_inference_steps": 3, "output_type": "np"}
    return pipe(prompt, generator=noise_source, **arguments)[0]


def weights(pipe):
    return [p for name in ("transformer", "vae", "text_encoder") for p in getattr(pipe, name).state_dict().values()]


def test_a_saved_sd3_pipeline_reloads_alone_and_gives_the_same_image(sd3, tmp_path):
    sd3.save_pretrained(tmp_path)
    again = DiffusionPipeline.from_pretrained(tmp_path)
    image = generate(sd3, height=32, width=64)
    assert image.shape == (1, 32, 64, 3)
    assert np.abs(image - generate(again, height=32, width=64)).max() <= 1e-6


def test_weights_follow_from_the_seed_and_leave_the_random_state_alone():
    before = torch.random.get_rng_state()
    one, same, other = weights(build_sd3(3)), weights(build_sd3(3)), weights(build_sd3(4))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(map(torch.equal, one, same))
    assert not all(map(torch.equal, one, other))


def test_the_two_clip_encoders_differ(sd3):
    first, second = (encoder.state_dict() for encoder in (sd3.text_encoder, sd3.text_encoder_2))
    assert not torch.equal(first["text_projection.weight"], second["text_projection.weight"])


@pytest.mark.parametrize("word", ["K7", "HC", "77"])
def test_a_prompt_fits_in_12_tokens_and_every_character_is_known(sd3, word):
    prompt = rendered.prompt_text(word)
    assert len(sd3.tokenizer(prompt).input_ids) == 10
    token_ids = sd3.tokenizer_3(prompt).input_ids
    assert len(token_ids) == 10
    assert sd3.tokenizer_3.unk_token_id not in token_ids


def test_different_words_have_different_pooled_embeddings(sd3):
    prompts = [prompt.text for prompt in rendered.prompts(rendered.Options(split="test"))]
    pooled = sd3.encode_prompt(prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=12)[2]
    distances = torch.cdist(pooled, pooled) + 1e9 * torch.eye(len(prompts), device="cpu")
    assert distances.min() > 0.1


def test_latents_are_stored_with_mean_0_and_std_1():
    vae, media = build_vae(0), rendered.Media(rendered.Options())
    images = first_frames(media, np.arange(16))
    store_latent_scale(vae, images)
    with torch.no_grad():
        encoded: Any = vae.encode(images)
        config: Any = vae.config
        latents = (encoded.latent_dist.mean - config.shift_factor) * config.scaling_factor
    assert abs(latents.mean()) < 1e-5
    assert abs(latents.std() - 1) < 1e-5


@pytest.mark.slow
def test_training_the_autoencoder_lowers_its_error_the_same_way_twice():
    media = rendered.Media(rendered.Options())
    images = first_frames(media, np.arange(8))

    def trained_error(num_steps):
        vae = build_vae(0)
        if num_steps:
            train_vae(vae, media, seed=0, num_steps=num_steps, batch_size=4)
        with torch.no_grad():
            return (vae(images).sample - images).square().mean().item()

    assert trained_error(6) < 0.5 * trained_error(0)
    assert trained_error(2) == pytest.approx(trained_error(2), abs=1e-6)


def test_the_command_writes_a_pipeline_in_safetensors(tmp_path):
    main([str(tmp_path), "--vae-steps", "2"])
    assert DiffusionPipeline.from_pretrained(tmp_path).vae.config.scaling_factor != 1.0
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".bin", ".pt", ".pickle"}]
