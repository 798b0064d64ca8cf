"""Every model plugin against the stock diffusers pipeline of the same directory: inputs, samplers, media, exports."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_rl_core import export, pipelines, sizes
from cosmos_rl_core.config.policy import LoraConfig, SolverConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import guided_velocity, stack
from cosmos_rl_core.policy_weights import CURRENT, prepare
from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.schedule import schedule_of
from cosmos_rl_core.sampling.solvers import kernel_of
from tests import other_device
from tests.families import (
    LENGTH,
    PROMPTS,
    SCHEDULERS,
    SIZE,
    Family,
    fed_to,
    moved,
    run_stock,
    stock_pipeline,
)

LORA = LoraConfig(r=4, lora_alpha=12.0)


def kernel(solver: Any, scheduler: Any, num_steps: int) -> Kernel:
    config = SolverConfig(solver=solver, num_steps=num_steps)
    return kernel_of(config, lambda: schedule_of(scheduler, num_steps))


def solver_of(scheduler: Any) -> str:
    (solver,) = [name for name, make in SCHEDULERS.items() if type(make()) is type(scheduler)]
    return solver


def pixels_of(stock_media: Any) -> np.ndarray:
    """Pictures, or lists of them, as the stock pipeline gives them for people: uint8 ``[B, frames, H, W, 3]``."""
    return np.stack([np.stack([np.asarray(f) for f in (m if isinstance(m, list) else [m])]) for m in stock_media])


def largest_difference(ours: Tensor, pixels: np.ndarray) -> int:
    assert ours.dtype == torch.uint8
    assert ours.shape == pixels.shape
    return int(np.abs(ours.cpu().numpy().astype(int) - pixels.astype(int)).max())


def random_pixels(family: Family) -> Tensor:
    """Two items of smooth colours with some noise."""
    generator = np.random.default_rng(2)
    coarse = generator.integers(0, 256, (2, family.frames, 2, 4, 3)).repeat(16, 2).repeat(16, 3)
    return torch.from_numpy((coarse + generator.integers(-20, 20, coarse.shape)).clip(0, 255).astype(np.uint8))


# ---- what the transformer is fed


@torch.no_grad()
def test_the_transformer_is_fed_the_bits_that_the_stock_pipeline_feeds_it(family: Family):
    """Embeddings and masks of the prompt, and those of the model's negative prompt, by the same arguments."""
    prompt, negative = (
        stack(family.model.encode_prompts([text], LENGTH), family.device) for text in (PROMPTS[0], family.model.negative_prompt)
    )
    noise = family.noise[:1]
    with fed_to(family.stock.transformer) as theirs:
        run_stock(family.stock, noise, prompt=PROMPTS[:1], num_inference_steps=1, guidance_scale=3.0)
    with fed_to(family.model.transformer) as ours:
        guided_velocity(family.model, noise, torch.ones(1, device=family.device), prompt, negative, 3.0)

    def rows(calls: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
        """Tensors of each sample of each call, except the state and the time."""
        apart = {"hidden_states", "timestep"}
        return [
            {n: v[min(row, len(v) - 1)] for n, v in call.items() if isinstance(v, Tensor) and n not in apart}
            for call in calls
            for row in range(len(call["hidden_states"]))
        ]

    def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)

    expected = rows(theirs)
    matches = [[i for i, row in enumerate(expected) if equal(own, row)] for own in rows(ours)]
    assert len(expected) == 2
    assert sorted(itertools.chain(*matches)) == [0, 1]
    assert matches[0] != matches[1]
    assert expected[0]["encoder_hidden_states"].std() > 0.01


def test_conditioning_does_not_depend_on_its_company(family: Family):
    (alone,) = family.model.encode_prompts([PROMPTS[0]], LENGTH)
    _, together, _ = family.model.encode_prompts(["x", PROMPTS[0], "a longer one"], LENGTH)
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    assert not any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in alone.values())


def test_the_timestep_is_float_and_never_truncated(family: Family, monkeypatch: pytest.MonkeyPatch):
    """It is the number that the stock pipeline feeds with a scheduler whose timesteps are not rounded."""
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    with fed_to(family.stock.transformer) as theirs:
        run_stock(family.stock, family.noise)
    with fed_to(family.model.transformer) as ours:
        sample(family.velocity(), family.noise, kernel("euler", family.stock.scheduler, 5))
    assert len(ours) == len(theirs) == 5
    for own, expected in zip(ours, theirs, strict=True):
        assert own["timestep"].dtype == torch.float32
        assert own["timestep"].shape == expected["timestep"].shape
        assert torch.allclose(own["timestep"], expected["timestep"].float(), rtol=1e-6, atol=0)
    with fed_to(family.model.transformer) as fed:
        near = [family.velocity()(family.noise, torch.full((2,), t, device=family.device)) for t in (0.5001, 0.5009)]
    assert float(fed[0]["timestep"].flatten()[0]) < float(fed[1]["timestep"].flatten()[0])
    assert not torch.equal(*near)


# ---- velocity


@torch.no_grad()
def test_a_velocity_does_not_depend_on_its_batch(family: Family):
    t = torch.tensor([0.3, 0.9], device=family.device)
    together = family.velocity()(family.noise, t)
    assert together.dtype == torch.float32
    assert together.shape == family.noise.shape
    for i in range(2):
        own = {name: tensor[i : i + 1] for name, tensor in family.conditioning.items()}
        alone = family.model.velocity(family.noise[i : i + 1], t[i : i + 1], own)
        assert torch.allclose(alone[0], together[i], rtol=0, atol=1e-5)
    assert (together[0] - together[1]).abs().max() > 1e-2


@torch.no_grad()
def test_without_guidance_the_negative_is_never_asked_for(family: Family):
    t = torch.tensor([0.3, 0.7], device=family.device)
    plain = family.model.velocity(family.noise, t, family.conditioning)
    assert torch.equal(guided_velocity(family.model, family.noise, t, family.conditioning, None, 1.0), plain)
    assert (family.velocity(2.0)(family.noise, t) - plain).abs().max() > 1e-3
    with pytest.raises(ValueError, match="needs negative conditioning"):
        guided_velocity(family.model, family.noise, t, family.conditioning, None, 2.0)


def test_guidance_trains_both_predictions_or_the_conditional_one_alone(family: Family):
    t, scale = torch.tensor([0.3, 0.7], device=family.device), 3.0
    model = family.load("transformer")
    weight = next(p for name, p in model.transformer.named_parameters() if name.endswith("to_q.weight"))
    weight.requires_grad_()
    probe = torch.linspace(-1, 1, family.noise.numel(), device=family.device).view_as(family.noise)
    parts = [model.velocity(family.noise, t, given) for given in (family.conditioning, family.negative)]
    conditional, unconditional = (torch.autograd.grad((probe * v).sum(), weight)[0] for v in parts)
    expected = {True: scale * conditional + (1 - scale) * unconditional, False: scale * conditional}
    size = expected[True].abs().max()
    assert (expected[True] - expected[False]).abs().max() > 0.01 * size
    guided = {
        both: guided_velocity(
            model, family.noise, t, family.conditioning, family.negative, scale, trains_unconditional=both
        )
        for both in (True, False)
    }
    assert torch.equal(guided[True], guided[False])
    for both, velocity in guided.items():
        (found,) = torch.autograd.grad((probe * velocity).sum(), weight)
        assert (found - expected[both]).abs().max() < 1e-4 * size
    with torch.no_grad():
        args = (model, family.noise, t, family.conditioning, family.negative, scale)
        assert not guided_velocity(*args).requires_grad


# ---- samplers


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_our_euler_is_the_stock_pipeline_with_an_euler_scheduler(
    family: Family, guidance_scale: float, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    expected = run_stock(family.stock, family.noise, guidance_scale=guidance_scale)
    steps = kernel("euler", family.stock.scheduler, 5)
    ours = sample(family.velocity(guidance_scale), family.noise, steps).latents
    assert (ours - expected).abs().max() < 1e-4
    assert (ours - family.noise).abs().max() > 0.1


# 5 and 16: stock DPM-Solver ends otherwise below 15 steps. Both together are `slow`: guidance is of the velocity, which
# knows nothing of how many steps there are.
@pytest.mark.parametrize(
    ("num_steps", "guidance_scale"), [(5, 1.0), (5, 3.0), (16, 1.0), pytest.param(16, 3.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("scheduler", ["as it ships", "dpm2", "unipc"])
def test_our_solver_is_the_stock_pipeline_on_its_own_timesteps(
    family: Family, scheduler: str, num_steps: int, guidance_scale: float, monkeypatch: pytest.MonkeyPatch
):
    """Multistep schedulers feed the transformer whole timesteps: so does this test, so that the samplers compare."""
    if scheduler in SCHEDULERS:
        monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS[scheduler]())
    steps = kernel(solver_of(family.stock.scheduler), family.stock.scheduler, num_steps)
    with fed_to(family.stock.transformer) as theirs:
        options = {"num_inference_steps": num_steps, "guidance_scale": guidance_scale}
        expected = run_stock(family.stock, family.noise, **options)
    with fed_to(family.model.transformer) as ours:
        family.velocity()(family.noise, torch.ones(2, device=family.device))
    (at_1,) = {float(call["timestep"].max()) for call in ours}
    told = [float(call["timestep"].max()) / at_1 for call in theirs[:: len(theirs) // num_steps]]
    assert len(told) == num_steps
    assert max(abs(t - step.t) for t, step in zip(told, steps.steps, strict=True)) <= 1e-3
    stock_t = {float(np.float32(step.t)): t for t, step in zip(told, steps.steps, strict=True)}
    velocity = family.velocity(guidance_scale)

    def on_stock_timesteps(x: Tensor, t: Tensor) -> Tensor:
        return velocity(x, torch.tensor([stock_t[level] for level in t.tolist()], device=family.device))

    latents = sample(on_stock_timesteps, family.noise, steps).latents
    assert (latents - expected).abs().max() < 1e-4
    assert (latents - family.noise).abs().max() > 0.1


def test_in_bfloat16_our_samples_stay_near_those_in_float32(family: Family, monkeypatch: pytest.MonkeyPatch):
    """Measured, of latents of deviation 1.3: at most 0.019 to 0.024 off, and 0.019 to 0.032 from the stock pipeline's.

    That one rounds its states to bfloat16 too, ours are float32 whatever the transformer computes in.
    """
    if family.device == other_device.DEVICE:
        pytest.skip("has no autocast")
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    exact = run_stock(family.stock, family.noise, guidance_scale=3.0)
    with torch.autocast(family.device.type, dtype=torch.bfloat16):
        steps = kernel("euler", family.stock.scheduler, 5)
        ours = sample(family.velocity(3.0), family.noise, steps).latents
        theirs = run_stock(family.stock, family.noise, guidance_scale=3.0)
    assert ours.dtype == torch.float32
    assert 1e-3 < (ours - exact).abs().max() < 0.03
    assert (ours - theirs).abs().max() < 0.04


# ---- media


def test_decoded_latents_are_the_stock_pipelines_pictures(family: Family):
    latents = run_stock(family.stock, family.noise)
    pictures = pixels_of(run_stock(family.stock, family.noise, output_type="pil"))
    decoded = family.model.decode(latents)
    assert decoded.shape == (2, family.frames, *SIZE, 3)
    assert largest_difference(decoded, pictures) <= 1
    assert pictures.std() > 3


def test_encoding_is_what_decoding_undoes(family: Family):
    """Latents that were scaled in and out again are the encoder's own, without a draw from its posterior."""
    pixels = random_pixels(family)
    latents = family.model.encode_media(pixels)
    assert latents.dtype == torch.float32
    assert latents.shape == (2, *family.model.latent_shape(SIZE, family.frames))
    assert torch.equal(latents, family.model.encode_media(pixels))
    vae, unit = family.stock.vae, (pixels.to(family.device).float() / 127.5 - 1).permute(0, 4, 1, 2, 3)
    with torch.no_grad():
        encoded = vae.encode(unit if latents.ndim == 5 else unit[:, :, 0])
        raw = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        images = vae.decode(raw).sample
    expected = _loading.unit_to_pixels(images if latents.ndim == 5 else images[:, :, None]).permute(0, 2, 3, 4, 1)
    assert largest_difference(family.model.decode(latents), expected.cpu().numpy()) <= 1
    assert (latents - raw).abs().max() > 0.05
    assert expected.float().std() > 3


def test_every_pixel_level_survives_scaling_and_rounding(device: torch.device):
    levels = torch.arange(256, dtype=torch.uint8, device=device)
    assert torch.equal(_loading.unit_to_pixels(_loading.pixels_to_unit(levels)), levels)
    assert _loading.unit_to_pixels(torch.tensor([-2.0, 2.0], device=device)).tolist() == [0, 255]


# ---- sizes


@pytest.mark.parametrize("frames", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("size", [(32, 32), (32, 64), (16, 48), (36, 33), (24, 40), (64, 4096)])
def test_a_plan_refuses_the_sizes_that_the_model_refuses(family: Family, size: tuple[int, int], frames: int):
    try:
        expected = int(np.prod(family.model.latent_shape(size, frames)))
    except ConfigError:
        with pytest.raises(ConfigError, match=r"inference_size|train_frames"):
            sizes.latent_elements(family.folder, size, frames)
    else:
        assert sizes.latent_elements(family.folder, size, frames) == expected


def test_a_plan_knows_how_much_lora_trains(family: Family):
    weights = prepare(family.load("transformer").transformer, LORA, reference=False)
    shapes = sizes.weight_shapes(family.folder)
    assert sizes.trainable_elements(shapes, LORA) == sum(p.numel() for p in weights.parameters.values())
    stored = family.model.transformer.state_dict()
    assert sizes.trainable_elements(shapes, None) == sum(tensor.numel() for tensor in stored.values())


# ---- loading


def test_only_the_asked_components_are_loaded(family: Family):
    text, shape = family.load("text"), (SIZE, family.frames)
    assert len(text.encode_prompts(PROMPTS, LENGTH)) == 2
    assert text.scheduler.config == family.stock.scheduler.config
    with pytest.raises(RuntimeError, match="'transformer', which was not loaded"):
        _ = text.transformer
    denoiser = family.load("transformer")
    assert not any(p.requires_grad for p in denoiser.transformer.parameters())
    assert not denoiser.transformer.training
    assert denoiser.latent_shape(*shape) == text.latent_shape(*shape)
    with pytest.raises(RuntimeError, match="'text'"):
        denoiser.encode_prompts(PROMPTS, LENGTH)
    with pytest.raises(RuntimeError, match="'vae'"):
        denoiser.decode(torch.zeros(1, *denoiser.latent_shape(*shape), device=family.device))


def test_fresh_weights_are_a_function_of_the_seed_alone(family: Family):
    transformer = family.load("transformer").transformer

    def fresh(seed: int) -> dict[str, Tensor]:
        _loading.initialise(transformer, seed)
        return {name: tensor.clone() for name, tensor in transformer.state_dict().items()}

    before = torch.get_rng_state()
    first = fresh(7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3, device="cpu")
    other, again = fresh(8), fresh(7)
    loaded = family.model.transformer.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["proj_out.weight"], other["proj_out.weight"])
    assert not torch.equal(first["proj_out.weight"], loaded["proj_out.weight"])


# ---- exports


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_exported_weights_make_the_policys_pictures_in_the_stock_pipeline(
    family: Family, lora: LoraConfig | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = family.load("transformer", "vae")
    weights = prepare(model.transformer, lora)
    weights.load(CURRENT, moved(weights.get(CURRENT), 0.2 if lora else 0.05))
    files = (
        export.lora_files(weights.get(CURRENT), lora).items()
        if lora
        else export.full_pipeline(family.folder, weights.get(CURRENT))
    )
    for name, content in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)

    if lora is None:
        assert pipelines.pipeline_files(tmp_path) == pipelines.pipeline_files(family.folder)
    stock = stock_pipeline(family.folder if lora else tmp_path, family.device)
    if lora:
        stock.load_lora_weights(tmp_path / "lora", weight_name="model.safetensors", adapter_name="default")
        adapter = stock.transformer.peft_config["default"]
        assert (adapter.r, adapter.lora_alpha) == (4, 12.0)
    monkeypatch.setattr(stock, "scheduler", SCHEDULERS["euler"]())
    with weights.use(CURRENT):
        steps = kernel("euler", stock.scheduler, 5)
        ours = sample(lambda x, t: model.velocity(x, t, family.conditioning), family.noise, steps).latents
    assert (ours - run_stock(stock, family.noise)).abs().max() < 1e-4
    pictures = pixels_of(run_stock(stock, family.noise, output_type="pil"))
    assert largest_difference(model.decode(ours), pictures) <= 1
    base = sample(family.velocity(), family.noise, steps).latents
    assert (ours - base).abs().max() > 0.05
