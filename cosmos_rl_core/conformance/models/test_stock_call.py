"""The stock call of every model plugin, as its spec states it: guidance, and the arguments for its scheduler."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from cosmos_rl_core import seeds
from cosmos_rl_core.conformance.models.families import (
    PROMPTS,
    SCHEDULERS,
    SIZE,
    STATE,
    Family,
    fed_to,
    kernel,
    run_stock,
)
from cosmos_rl_core.pipelines import directories, guidance, sizes
from cosmos_rl_core.sampling.rollout import sample

LINE: dict[str, Any] = {"base_image_seq_len": 4, "max_image_seq_len": 64, "base_shift": 0.5, "max_shift": 3.0}
STEPS = 2


class NotingScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler's scheduler, which keeps the arguments that a pipeline gives it."""

    given: dict[str, Any]

    def set_timesteps(
        self,
        num_inference_steps: Any = None,
        device: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        timesteps: Any = None,
    ) -> None:
        self.given = {"sigmas": sigmas, "mu": mu}
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("size", "num_steps"), [(SIZE, 2), ((64, 64), 3)])
def test_a_scheduler_is_given_the_levels_and_the_shift_that_the_spec_states(
    family: Family, size: tuple[int, int], num_steps: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch
):
    spec, line = directories.spec(family.folder), LINE if dynamic else {}
    if dynamic and spec.shift is None:
        pytest.skip("such schedulers are refused: test_against_stock.py")
    scheduler: Any = NotingScheduler(use_dynamic_shifting=dynamic, **line)
    monkeypatch.setattr(family.stock, "scheduler", scheduler)
    shape = family.model.latent_shape(size, family.frames)
    noise = torch.from_numpy(seeds.normal(shape, "noted"))[None].to(family.device)
    options = {"prompt": PROMPTS[:1], "num_inference_steps": num_steps, "height": size[0], "width": size[1]}
    run_stock(family.stock, noise, **options)
    levels, found = spec.stock_sigmas(num_steps, scheduler.config), scheduler.given
    assert type(levels) is type(found["sigmas"])
    assert levels is None or np.allclose(np.asarray(levels), found["sigmas"], rtol=0, atol=1e-6)
    assert (found["mu"] is not None) == (spec.always_shifts or (spec.shift is not None and dynamic))
    if found["mu"] is not None:
        assert spec.shift is not None
        tokens = sizes.num_tokens(family.folder, size, family.frames)
        assert found["mu"] == pytest.approx(spec.shift(tokens, num_steps, scheduler.config), rel=1e-12)


def test_guidance_begins_where_the_spec_says(family: Family, monkeypatch: pytest.MonkeyPatch):
    """At our scale 1 the stock pipeline makes one prediction a prompt; at the smallest scale above it, two."""
    monkeypatch.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
    spec, steps = directories.spec(family.folder), kernel(family, "euler", STEPS)
    made: list[torch.Tensor] = []
    for scale, predictions in ((1.0, 1), (spec.guidance_off + spec.guidance_offset + 0.25, 2)):
        with fed_to(family.stock.transformer) as fed:
            expected = run_stock(family.stock, family.noise, num_inference_steps=STEPS, guidance_scale=scale)
        assert sum(len(call[STATE]) for call in fed) == predictions * STEPS * len(PROMPTS), guidance.stock_scale(
            spec, scale
        )
        ours = sample(family.velocity(scale), family.noise, steps).latents
        assert (ours - expected).abs().max() < 1e-4
        made.append(ours)
    assert (made[0] - made[1]).abs().max() > 1e-3
