"""The Cosmos-Predict2.5 plugin against the stock pipeline of the same directory, with and without given frames."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Cosmos2_5_PredictBasePipeline, CosmosTransformer3DModel, FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers import transformer_cosmos

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import as_torchvision, tensors_of, write_files
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, generated, given_frames, stack
from cosmos_rl_core.models._loading import COMPONENTS
from cosmos_rl_core.models.cosmos_predict2_5 import SPEC
from cosmos_rl_core.models.cosmos_predict2_5 import model as cosmos_predict2_5
from cosmos_rl_core.models.cosmos_predict2_5.tiny import LetsPass
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.sampling.flow import euler, flow_sde
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.weights import export
from cosmos_rl_core.weights.policy_weights import prepare

CPU = torch.device("cpu")
PROMPT = "a red cube, 3 balls."
LENGTH = 200
SIZE, FRAMES, LATENT_FRAMES = (32, 32), 9, 3
STEPS = 3
SHIFT = 5.0
LORA = LoraConfig(r=4, lora_alpha=12.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tiny_pipelines.save("cosmos_predict2_5", tmp_path_factory.mktemp("cosmos") / "base"))


@pytest.fixture(scope="session")
def model(folder):
    return load_model(folder, COMPONENTS, CPU)


def load_stock(folder: str) -> Any:
    pipeline = Cosmos2_5_PredictBasePipeline.from_pretrained(folder, safety_checker=LetsPass(), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def stock(folder):
    """The stock pipeline, with Euler steps in place of UniPC's."""
    pipeline = load_stock(folder)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    return pipeline


@pytest.fixture(scope="session")
def conditioning(model):
    prompt, negative = model.encode_prompts([PROMPT, model.negative_prompt], LENGTH)
    return prompt, negative


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape, np.float32))


def pixels(frames: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(2).integers(0, 256, (1, frames, *SIZE, 3), np.uint8))


@pytest.fixture(scope="session")
def noise(model):
    return normal(1, *model.latent_shape(SIZE, FRAMES))


def stock_output(pipeline: Any, noise: torch.Tensor, guidance_scale: float, output_type: str = "latent", **given: Any):
    return pipeline(
        prompt=PROMPT, latents=noise.clone(), guidance_scale=guidance_scale, num_inference_steps=STEPS,
        height=SIZE[0], width=SIZE[1], num_frames=FRAMES, max_sequence_length=LENGTH, output_type=output_type,
        return_dict=False, **given,
    )[0]  # fmt: skip


def ours(model, conditioning, noise, guidance_scale, given=None, build=euler, **options):
    batch = noise.shape[0]
    prompt, negative = (c.each(lambda entry: entry.expand(batch, -1, -1)) for c in conditioning)
    if given is not None:
        prompt |= {name: torch.stack([one] * batch) for name, one in given_frames(given, noise.shape[2]).items()}

    def velocity(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return guided_velocity(model, x_t, t, prompt, negative, guidance_scale)

    schedule = schedule_of(FlowMatchEulerDiscreteScheduler(shift=SHIFT), STEPS)
    held = {"mask": generated(prompt), "given": prompt.get("conditional_latents")}
    return sample(velocity, noise, build(schedule), **held, **options)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [PROMPT, "", "x" * 300])
def test_conditioning_is_the_stock_pipelines_own(model, stock, prompt):
    (found,) = model.encode_prompts([prompt], LENGTH)
    expected, negative = stock.encode_prompt(prompt, max_sequence_length=LENGTH)
    assert torch.equal(found["prompt_embeds"], expected[0])
    assert found["prompt_embeds"].shape == (LENGTH, 2 * 16)
    assert torch.equal(model.encode_prompts([model.negative_prompt], LENGTH)[0]["prompt_embeds"], negative[0])
    # Every layer is normalised by itself, over its channels.
    layers = found["prompt_embeds"].view(LENGTH, 2, 16)
    assert torch.allclose(layers.mean(-1), torch.zeros(LENGTH, 2, device=CPU), atol=1e-5)
    assert torch.allclose(layers.std(-1), torch.ones(LENGTH, 2, device=CPU), atol=1e-4)


def test_prompts_differ_where_they_are_read_and_not_in_the_system_prompt(model):
    texts = [PROMPT, "", model.negative_prompt]
    first, empty, negative = (c["prompt_embeds"] for c in model.encode_prompts(texts, LENGTH))
    start = len("<system\n") + len("You are a helpful assistant who will provide prompts to an image generator.")
    assert torch.equal(first[:start], empty[:start])
    assert torch.equal(first[:start], negative[:start])
    assert (first - empty).abs().max() > 0.1
    assert (first - negative).abs().max() > 0.1


def test_conditioning_does_not_depend_on_its_batch(model):
    (alone,) = model.encode_prompts([PROMPT], LENGTH)
    _, together, _ = model.encode_prompts(["x", PROMPT, "a longer one"], LENGTH)
    assert torch.equal(alone["prompt_embeds"], together["prompt_embeds"])


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_text_to_video_gives_the_stock_pipelines_latents_and_media(model, stock, conditioning, noise, guidance_scale):
    found = ours(model, conditioning, noise, guidance_scale).latents
    stock_scale = guidance_scale - (guidance_scale > 1) * SPEC.guidance_offset
    assert (found - stock_output(stock, noise, stock_scale)).abs().max() < 1e-4
    assert (found - noise).abs().max() > 0.1
    media = np.asarray(stock_output(stock, noise, stock_scale, "np")) * 255
    assert np.abs(model.decode(found).numpy() - media).max() <= 1


def test_no_given_frames_are_text_to_video(model, conditioning, noise):
    nothing = noise.new_zeros(4, 0, 4, 4)
    with_mask = ours(model, conditioning, noise, 3.0, nothing).latents
    assert torch.equal(with_mask, ours(model, conditioning, noise, 3.0).latents)


def test_a_padding_mask_of_zeros_goes_in_where_the_transformer_takes_one(tmp_path, noise, monkeypatch):
    folder = str(tiny_pipelines.save("cosmos_predict2_5", tmp_path / "padded", concat_padding_mask=True))
    if not hasattr(transformer_cosmos, "transforms"):
        monkeypatch.setattr(transformer_cosmos, "transforms", as_torchvision().transforms, raising=False)
    model, stock = cosmos_predict2_5.load(folder, COMPONENTS, CPU), load_stock(folder)
    stock.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    prompts = model.encode_prompts([PROMPT, model.negative_prompt], LENGTH)
    found = ours(model, prompts, noise, 3.0).latents
    assert (found - stock_output(stock, noise, 2.0)).abs().max() < 1e-4


def test_the_schedule_is_the_one_that_the_stock_pipeline_feeds(model, folder, noise):
    """UniPC's own grid, of flow sigmas on Karras' spacing: what the stock transformer is told is what ours is."""
    stock, fed = load_stock(folder), []
    hook = stock.transformer.register_forward_pre_hook(lambda _m, _a, kw: fed.append(kw["timestep"]), with_kwargs=True)
    stock_output(stock, noise, 1.0)
    hook.remove()
    sigmas = schedule_of(model.scheduler, STEPS).sigmas
    assert sigmas[0] == pytest.approx(200 / 201, abs=1e-6)
    assert [float(t[0, 0, 0, 0, 0]) for t in fed] == list(sigmas[:-1])


def fed_by(model, x_t, t, conditioning) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []
    hook = model.transformer.register_forward_pre_hook(lambda _m, _a, kw: seen.append(kw), with_kwargs=True)
    with torch.no_grad():
        model.velocity(x_t, t, conditioning)
    hook.remove()
    return seen[0]


def test_the_timestep_is_t_itself_in_float32_and_1e_4_at_given_frames(model, conditioning, noise):
    x_t, t = torch.cat([noise, -noise]), torch.tensor([0.12345678, 0.9999], dtype=torch.float64, device=CPU)
    batch = stack([conditioning[0]] * 2, CPU)
    fed = fed_by(model, x_t, t, batch)
    assert fed["timestep"].dtype == torch.float32
    assert fed["timestep"].shape == (2, 1, LATENT_FRAMES, 1, 1)
    assert torch.equal(fed["timestep"].flatten(1), t.float()[:, None].expand(2, LATENT_FRAMES))
    assert torch.equal(fed["hidden_states"], x_t)
    assert fed["condition_mask"].count_nonzero() == fed["padding_mask"].count_nonzero() == 0
    # One given frame in the first sample, two in the second.
    given = normal(4, 2, 4, 4)
    frames = stack([Conditioning({}, given_frames(given[:, :n], LATENT_FRAMES)) for n in (1, 2)], CPU).shared
    fed = fed_by(model, x_t, t, batch | frames)
    assert fed["timestep"].flatten(1).tolist() == [
        pytest.approx([1e-4, 0.12345678, 0.12345678]),
        pytest.approx([1e-4, 1e-4, 0.9999]),
    ]
    assert torch.equal(fed["condition_mask"].mean((1, 3, 4)), torch.tensor([[1.0, 0, 0], [1, 1, 0]], device=CPU))
    assert torch.equal(fed["hidden_states"][0], torch.cat([given[:, :1], x_t[0, :, 1:]], 1))
    assert torch.equal(fed["hidden_states"][1], torch.cat([given, x_t[1, :, 2:]], 1))


@torch.no_grad()
def test_given_frames_do_not_move_and_their_noise_does_not_count(model, conditioning, noise):
    batch = stack([conditioning[0] | given_frames(normal(4, 1, 4, 4), LATENT_FRAMES)], CPU)
    t = torch.tensor([0.5], device=CPU)
    velocity = model.velocity(noise, t, batch)
    assert velocity[:, :, :1].count_nonzero() == 0
    assert velocity[:, :, 1:].abs().min() > 0
    other = noise.clone()
    other[:, :, 0] = 7.0
    assert torch.equal(model.velocity(other, t, batch), velocity)


def test_a_sample_does_not_depend_on_its_batch(model, conditioning, noise):
    three = torch.cat([noise, -noise, 2 * noise])
    together = ours(model, conditioning, three, 3.0, normal(4, 1, 4, 4)).latents
    alone = ours(model, conditioning, noise, 3.0, normal(4, 1, 4, 4)).latents
    assert (together[:1] - alone).abs().max() < 1e-5


def test_every_recorded_state_of_a_stochastic_rollout_holds_the_given_frames(model, conditioning, noise):
    """Their log-probability counts the generated frames alone: the given ones would add a density of their own."""
    given = normal(4, 1, 4, 4)

    def run(noise: torch.Tensor) -> Any:
        return ours(
            model, conditioning, noise, 1.0, given, lambda s: flow_sde(s, 0.7),
            draw=lambda i: normal(i + 9, *noise.shape)[-1], record=range(STEPS),
        )  # fmt: skip

    trajectory = run(noise)
    assert all(torch.equal(state[0, :, :1], given) for state in trajectory.states.values())
    assert torch.equal(trajectory.latents[0, :, :1], given)
    changed = noise.clone()
    changed[:, :, 0] += 3
    other = run(changed)
    assert all(torch.equal(other.log_prob[i], trajectory.log_prob[i]) for i in range(STEPS))
    standard = normal(9, *noise.shape)[-1][:, :, 1:]
    step = flow_sde(schedule_of(FlowMatchEulerDiscreteScheduler(shift=SHIFT), STEPS), 0.7).steps[0]
    expected = -(standard.double() ** 2).mean() / 2 - np.log(step.std) - np.log(2 * np.pi) / 2
    assert float(trajectory.log_prob[0]) == pytest.approx(float(expected), abs=1e-5)


def test_encode_is_the_normalised_posterior_mode_and_its_beginning_needs_no_rest(model, stock):
    clip = pixels(FRAMES)
    latents = model.encode_media(clip)
    assert latents.shape == (1, *model.latent_shape(SIZE, FRAMES))
    with torch.no_grad():
        raw = stock.vae.encode((clip.float() / 127.5 - 1).permute(0, 4, 1, 2, 3)).latent_dist.mode()
    mean, std = torch.tensor([[0.1, -0.2, 0.3, 0.0], [1.5, 0.7, 2.0, 1.0]], device=CPU).view(2, -1, 1, 1, 1)
    assert (latents * std + mean - raw).abs().max() < 1e-5
    assert (latents - (raw - mean) / std).abs().max() < 1e-5
    for frames, given in ((1, 1), (5, 2)):
        assert (model.encode_media(clip[:, :frames]) - latents[:, :, :given]).abs().max() < 1e-5


@torch.no_grad()
def test_decode_rounds_as_the_stock_pipeline_does(model, stock, noise):
    """By the VAE's own deviation, not by the pipeline's attribute, which once was it and now is its inverse."""
    config = stock.vae.config
    mean, std = (torch.tensor(v, device=CPU).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
    video = stock.vae.decode(noise / (1.0 / std) + mean).sample
    expected = np.stack([[np.asarray(f) for f in v] for v in stock.video_processor.postprocess_video(video, "pil")])
    found = model.decode(noise)
    assert found.dtype == torch.uint8
    assert found.shape == (1, FRAMES, *SIZE, 3)
    assert np.array_equal(found.numpy(), expected)


def test_impossible_sizes_and_frames_are_refused(model):
    assert model.latent_shape((64, 48), 1) == (4, 1, 8, 6)
    with pytest.raises(ConfigError, match="multiples of 16"):
        model.latent_shape((40, 32), FRAMES)
    with pytest.raises(ConfigError, match="1 plus a multiple of 4"):
        model.latent_shape(SIZE, 8)
    # Of max_size (8, 8, 8) in patches of (1, 2, 2) the longest counts, 8 patches, whatever the side.
    assert model.latent_shape((32, 128), 1) == (4, 1, 4, 16)
    with pytest.raises(ConfigError, match=r"are \[1, 2, 9\] tokens .* at most \[8, 8, 8\]"):
        model.latent_shape((32, 144), 1)
    with pytest.raises(ConfigError, match=r"are \[9, 2, 2\] tokens"):
        model.latent_shape(SIZE, 33)


def test_only_the_asked_components_are_loaded(folder, conditioning):
    text = cosmos_predict2_5.load(folder, ("text",), CPU)
    assert torch.equal(text.encode_prompts([PROMPT], LENGTH)[0]["prompt_embeds"], conditioning[0]["prompt_embeds"])
    assert text.transformer is None
    assert text.pipeline.vae is None
    denoiser = cosmos_predict2_5.load(folder, ("transformer",), CPU)
    assert not any(p.requires_grad for p in denoiser.transformer.parameters())
    assert not denoiser.transformer.training
    assert denoiser.latent_shape(SIZE, FRAMES) == (4, 3, 4, 4)
    assert denoiser.pipeline.text_encoder is None


def test_an_exported_lora_gives_the_policys_latents_in_the_stock_pipeline(folder, tmp_path, noise):
    model = cosmos_predict2_5.load(folder, COMPONENTS, CPU)
    weights = prepare(model.transformer, LORA)
    generator = torch.Generator("cpu").manual_seed(4)
    shapes = {name: p.shape for name, p in weights.parameters.items()}
    moved = {name: 0.2 * torch.randn(shape, generator=generator, device=CPU) for name, shape in shapes.items()}
    weights.load("current", moved)
    write_files(export.lora_files(tensors_of(weights, "current"), LORA), tmp_path)
    stock = load_stock(folder)
    stock.scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    base = stock_output(stock, noise, 2.0)
    stock.load_lora_weights(str(tmp_path / "lora"), weight_name="model.safetensors", adapter_name="default")
    prompts = model.encode_prompts([PROMPT, model.negative_prompt], LENGTH)
    policy = ours(model, prompts, noise, 3.0).latents
    assert (stock_output(stock, noise, 2.0) - policy).abs().max() < 1e-4
    assert (policy - base).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("num_layers", "num_heads", "num_parameters"), [(28, 16, 2_059_174_912), (36, 40, 14_368_047_104)]
)
def test_the_real_transformers_take_the_inputs_that_the_model_makes(
    folder, num_layers, num_heads, num_parameters, monkeypatch
):
    """2B and 14B without weights, with the settings of diffusers' conversion script, at 93 frames of 704 x 1280."""
    if not hasattr(transformer_cosmos, "transforms"):
        monkeypatch.setattr(transformer_cosmos, "transforms", as_torchvision().transforms, raising=False)
    with torch.device("meta"):
        transformer = CosmosTransformer3DModel(
            in_channels=17, out_channels=16, num_attention_heads=num_heads, attention_head_dim=128,
            num_layers=num_layers, text_embed_dim=1024, adaln_lora_dim=256, max_size=(128, 240, 240),
            rope_scale=(1.0, 3.0, 3.0), extra_pos_embed_type=None, use_crossattn_projection=True,
            crossattn_proj_in_channels=100352, encoder_hidden_states_channels=1024,
        )  # fmt: skip
    assert sum(p.numel() for p in transformer.parameters()) == num_parameters
    model = cosmos_predict2_5.load(folder, (), CPU)
    model.pipeline.transformer = transformer
    latents = torch.empty(1, 16, 24, 88, 160, device="meta")
    given = given_frames(latents[0, :, :2], 24)
    batch = Conditioning(
        {"prompt_embeds": torch.empty(1, 512, 100352, device="meta")}, {n: g[None] for n, g in given.items()}
    )
    with torch.no_grad():
        velocity = model.velocity(latents, torch.empty(1, device="meta"), batch)
    assert (velocity.shape, velocity.dtype, velocity.device.type) == (latents.shape, torch.float32, "meta")


def test_cosmos_compression_is_reckoned_as_the_stock_pipeline_does(tmp_path: Path):
    """By how often the VAE halves, not by the factors that its settings name."""
    folder = Path(tiny_pipelines.save("cosmos_predict2_5", tmp_path))
    file = folder / "vae/config.json"
    changed = {"temperal_downsample": [False, True], "dim_mult": [1, 1, 1]}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    stock = load_model(str(folder), (), CPU).pipeline
    assert (stock.vae_scale_factor_spatial, stock.vae_scale_factor_temporal) == (4, 2)
    assert sizes.latent_shape(str(folder), (32, 64), 5) == (4, 3, 8, 16)
