"""The model plugins against the stock diffusers pipelines of the same directory."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

from cosmos_rl_core import pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import COMPONENTS, guided_velocity, stack
from tests import tiny_pipelines

CPU = torch.device("cpu")
PROMPT = "a red cube, 3 balls."
LENGTH = 24
STEPS = 3
SIZES = {"sd3": ((32, 32), 1), "wan": ((32, 32), 5)}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {"sd3": str(tiny_pipelines.save_sd3(root / "sd3")), "wan": str(tiny_pipelines.save_wan(root / "wan"))}


@pytest.fixture(scope="session", params=["sd3", "wan"])
def family(request):
    return request.param


@pytest.fixture(scope="session")
def model(folders, family):
    return _loading.adapter_of(folders[family]).load(folders[family], COMPONENTS, CPU)


@pytest.fixture(scope="session")
def stock(folders, family):
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folders[family], local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="session")
def noise(model, family):
    shape = (2, *model.latent_shape(*SIZES[family]))
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape, np.float32))


def stock_output(stock, family, noise, guidance_scale, output_type):
    size, frames = SIZES[family]
    video = {"num_frames": frames} if family == "wan" else {}
    return stock(
        [PROMPT, "two"], latents=noise.clone(), guidance_scale=guidance_scale, num_inference_steps=STEPS,
        height=size[0], width=size[1], max_sequence_length=LENGTH, output_type=output_type, return_dict=False, **video,
    )[0]  # fmt: skip


def euler(model, stock, noise, guidance_scale):
    conditioning = stack(model.encode_prompts([PROMPT, "two"], LENGTH), CPU)
    negative = stack(model.encode_prompts(["", ""], LENGTH), CPU)
    stock.scheduler.set_timesteps(STEPS)
    sigmas, x_t = stock.scheduler.sigmas.double(), noise.clone()
    for now, after in itertools.pairwise(sigmas):
        with torch.no_grad():
            velocity = guided_velocity(model, x_t, now.expand(2), conditioning, negative, guidance_scale)
        x_t = x_t + (after - now).float() * velocity
    return x_t


@torch.no_grad()
def test_conditioning_is_the_stock_pipelines_own(model, stock, family):
    (ours,) = model.encode_prompts([PROMPT], LENGTH)
    if family == "sd3":
        embeds, _, pooled, _ = stock.encode_prompt(PROMPT, None, None, max_sequence_length=LENGTH)
        assert torch.equal(ours["pooled_prompt_embeds"], pooled[0])
    else:
        embeds, _ = stock.encode_prompt(PROMPT, max_sequence_length=LENGTH)
    assert torch.equal(ours["prompt_embeds"], embeds[0])
    assert ours["prompt_embeds"].std() > 0.01
    assert not ours["prompt_embeds"].requires_grad


@torch.no_grad()
def test_the_empty_prompt_is_the_stock_pipelines_negative(model, stock, family):
    (ours,) = model.encode_prompts([""], LENGTH)
    prompts = (PROMPT, None, None) if family == "sd3" else (PROMPT,)
    negative = stock.encode_prompt(*prompts, max_sequence_length=LENGTH)[1]
    assert torch.equal(ours["prompt_embeds"], negative[0])


def test_conditioning_does_not_depend_on_its_company(model):
    (alone,) = model.encode_prompts([PROMPT], LENGTH)
    _, together, _ = model.encode_prompts(["x", PROMPT, "a longer one"], LENGTH)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_euler_steps_give_the_stock_pipelines_latents_and_media(model, stock, family, noise, guidance_scale):
    ours = euler(model, stock, noise, guidance_scale)
    expected = stock_output(stock, family, noise, guidance_scale, "latent")
    assert (ours - expected).abs().max() < 1e-4
    assert (ours - noise).abs().max() > 0.1
    media = np.asarray([np.asarray(m) for m in stock_output(stock, family, noise, guidance_scale, "np")]) * 255
    frames = media[:, None] if family == "sd3" else media
    assert np.abs(model.decode(ours).numpy() - frames).max() <= 1


def test_guidance_two_moves_the_latents(model, stock, noise):
    assert (euler(model, stock, noise, 1.0) - euler(model, stock, noise, 2.0)).abs().max() > 1e-3


def test_without_guidance_the_negative_is_never_asked_for(model, noise):
    conditioning = stack(model.encode_prompts([PROMPT, "two"], LENGTH), CPU)
    t = torch.tensor([0.3, 0.7])
    with torch.no_grad():
        plain = model.velocity(noise, t, conditioning)
        assert torch.equal(guided_velocity(model, noise, t, conditioning, None, 1.0), plain)
    assert plain.dtype == torch.float32
    with pytest.raises(ValueError, match="needs negative conditioning"):
        guided_velocity(model, noise, t, conditioning, None, 2.0)


def test_guidance_trains_both_predictions_or_the_conditional_one_alone(model, noise):
    conditioning, negative = (stack(model.encode_prompts([text, text], LENGTH), CPU) for text in (PROMPT, ""))
    t, scale = torch.tensor([0.3, 0.7]), 3.0
    weight = next(p for name, p in model.transformer.named_parameters() if name.endswith("to_q.weight"))
    weight.requires_grad_()
    try:
        probe = torch.linspace(-1, 1, noise.numel()).view_as(noise)
        parts = [model.velocity(noise, t, given) for given in (conditioning, negative)]
        conditional, unconditional = (torch.autograd.grad((probe * v).sum(), weight)[0] for v in parts)
        expected = {True: scale * conditional + (1 - scale) * unconditional, False: scale * conditional}
        guided = {
            both: guided_velocity(model, noise, t, conditioning, negative, scale, trains_unconditional=both)
            for both in (True, False)
        }
        assert torch.equal(guided[True], guided[False])
        size = expected[True].abs().max()
        assert (expected[True] - expected[False]).abs().max() > 0.01 * size
        for both, velocity in guided.items():
            (found,) = torch.autograd.grad((probe * velocity).sum(), weight)
            assert (found - expected[both]).abs().max() < 1e-4 * size
        with torch.no_grad():
            assert not guided_velocity(model, noise, t, conditioning, negative, scale).requires_grad
    finally:
        weight.requires_grad_(False)


def test_the_timestep_is_float_and_never_truncated(model, noise):
    fed = []
    hook = model.transformer.register_forward_pre_hook(lambda _m, _a, kw: fed.append(kw["timestep"]), with_kwargs=True)
    t = torch.tensor([0.12345678, 0.9999], dtype=torch.float64)
    with torch.no_grad():
        model.velocity(noise, t, stack(model.encode_prompts([PROMPT, "two"], LENGTH), CPU))
    hook.remove()
    assert fed[0].dtype == torch.float32
    assert torch.equal(fed[0], (t * 1000).float())


def test_decode_rounds_as_the_stock_pipeline_does(model, stock, family, noise):
    if family == "sd3":
        images = stock.vae.decode(noise / stock.vae.config.scaling_factor + stock.vae.config.shift_factor).sample
        expected = np.stack([np.asarray(i) for i in stock.image_processor.postprocess(images.detach(), "pil")])[:, None]
    else:
        config = stock.vae.config
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        video = stock.vae.decode(noise / (1.0 / std) + mean).sample.detach()
        expected = np.stack([[np.asarray(f) for f in v] for v in stock.video_processor.postprocess_video(video, "pil")])
    pixels = model.decode(noise)
    size, frames = SIZES[family]
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (2, frames, *size, 3)
    assert np.array_equal(pixels.numpy(), expected)


def test_encode_is_the_normalised_posterior_mode(model, stock, family):
    size, frames = SIZES[family]
    pixels = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (2, frames, *size, 3), np.uint8))
    unit = pixels.float() / 127.5 - 1
    latents = model.encode_media(pixels)
    assert latents.shape == (2, *model.latent_shape(size, frames))
    with torch.no_grad():
        if family == "sd3":
            raw = stock.vae.encode(unit[:, 0].permute(0, 3, 1, 2)).latent_dist.mode()
            back = latents / 1.5305 + 0.0609
        else:
            raw = stock.vae.encode(unit.permute(0, 4, 1, 2, 3)).latent_dist.mode()
            mean, std = torch.tensor([[0.1, -0.2, 0.3, 0.0], [1.5, 0.7, 2.0, 1.0]]).view(2, -1, 1, 1, 1)
            back = latents * std + mean
    assert (back - raw).abs().max() < 1e-5
    assert torch.equal(latents, model.encode_media(pixels))


def test_every_pixel_level_survives_scaling_and_rounding():
    levels = torch.arange(256, dtype=torch.uint8, device=CPU)
    assert torch.equal(_loading.unit_to_pixels(_loading.pixels_to_unit(levels)), levels)
    assert _loading.unit_to_pixels(torch.tensor([-2.0, 2.0])).tolist() == [0, 255]


def test_impossible_sizes_and_frames_are_refused(model, family):
    with pytest.raises(ConfigError, match="multiples of"):
        model.latent_shape((36, 33), SIZES[family][1])
    with pytest.raises(ConfigError, match="frames must be 1"):
        model.latent_shape((32, 32), 3)
    if family == "sd3":
        with pytest.raises(ConfigError, match="at most 64 pixels"):
            model.latent_shape((128, 32), 1)


def test_sd3_refuses_prompts_that_the_stock_pipeline_refuses(folders):
    model = _loading.adapter_of(folders["sd3"]).load(folders["sd3"], ("text",), CPU)
    with pytest.raises(ConfigError, match="at most 512"):
        model.encode_prompts([PROMPT], 513)


def test_only_the_asked_components_are_loaded(folders, family):
    plugin = _loading.adapter_of(folders[family])
    text = plugin.load(folders[family], ("text",), CPU)
    assert len(text.encode_prompts([PROMPT], LENGTH)) == 1
    assert text.scheduler.config.shift == 3.0
    with pytest.raises(RuntimeError, match="'transformer', which was not loaded"):
        _ = text.transformer
    denoiser = plugin.load(folders[family], ("transformer",), CPU)
    assert not any(p.requires_grad for p in denoiser.transformer.parameters())
    assert not denoiser.transformer.training
    assert denoiser.latent_shape(*SIZES[family]) == text.latent_shape(*SIZES[family])
    with pytest.raises(RuntimeError, match="'text'"):
        denoiser.encode_prompts([PROMPT], LENGTH)
    with pytest.raises(RuntimeError, match="'vae'"):
        denoiser.decode(torch.zeros(1, *denoiser.latent_shape(*SIZES[family])))


def test_fresh_weights_are_a_function_of_the_seed_alone(folders, family):
    transformer = _loading.adapter_of(folders[family]).load(folders[family], ("transformer",), CPU).transformer
    loaded = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    before = torch.get_rng_state()
    _loading.initialise(transformer, 7)
    assert torch.equal(torch.get_rng_state(), before)
    first = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    torch.rand(3, device=CPU)
    _loading.initialise(transformer, 8)
    other = transformer.state_dict()["proj_out.weight"].clone()
    _loading.initialise(transformer, 7)
    assert all(torch.equal(first[name], tensor) for name, tensor in transformer.state_dict().items())
    assert not torch.equal(first["proj_out.weight"], other)
    assert not torch.equal(first["proj_out.weight"], loaded["proj_out.weight"])


def test_wan_two_stage_and_image_to_video_pipelines_are_refused(folders, tmp_path):
    folder = Path(tiny_pipelines.save_wan(tmp_path / "wan"))
    config = json.loads((folder / "transformer/config.json").read_text())
    (folder / "transformer/config.json").write_text(json.dumps({**config, "in_channels": 36}))
    with pytest.raises(ConfigError, match="not a text-to-video model"):
        _loading.adapter_of(str(folder)).load(str(folder), (), CPU)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "boundary_ratio": 0.9}))
    with pytest.raises(ConfigError, match=r"Wan 2\.2"):
        _loading.adapter_of(str(folder)).load(str(folder), (), CPU)


def test_adapters_are_found_without_importing_them(folders):
    assert pipelines.adapter_name(pipelines.pipeline_class(folders["sd3"])) == "sd3"
    assert pipelines.adapter_name("WanPipeline") == "wan"
    with pytest.raises(ConfigError, match=r"'FluxPipeline'; known: .*3Pipeline \(sd3\), WanPipeline \(wan\)"):
        pipelines.adapter_name("FluxPipeline")


def test_declared_pipeline_classes_are_what_the_import_sees():
    for name in ("sd3", "wan"):
        plugin = pipelines.plugins.load("models", name)
        assert all(pipelines.adapter_name(class_name) == name for class_name in plugin.PIPELINE_CLASSES)


def test_pipelines_module_does_not_import_torch():
    code = "import sys; from cosmos_rl_core.pipelines import adapter_name; adapter_name('WanPipeline');"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_paths_that_are_no_pipelines_are_config_errors(tmp_path, folders):
    with pytest.raises(ConfigError, match="names on a model hub are not downloaded"):
        pipelines.resolve_path("stabilityai/stable-diffusion-3.5-medium")
    with pytest.raises(ConfigError, match=r"no model_index\.json"):
        pipelines.resolve_path(str(tmp_path))
    with pytest.raises(ConfigError, match="no pipeline 'giant' ships with this project"):
        pipelines.resolve_path("package:giant")
    assert pipelines.resolve_path(folders["wan"]) == str(Path(folders["wan"]).resolve())


def test_a_pipelines_digest_is_its_paths_and_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.json").write_text("1")
    (tmp_path / "b.txt").write_text("2")
    first = pipelines.pipeline_digest(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/lock").write_text("3")
    assert pipelines.pipeline_digest(tmp_path) == first
    (tmp_path / "b.txt").write_text("22")
    second = pipelines.pipeline_digest(tmp_path)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert len({first, second, pipelines.pipeline_digest(tmp_path)}) == 3
