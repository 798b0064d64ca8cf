"""FLUX.2 klein: text and pictures to image, three layers of Qwen3, latents that the pipeline patches, then normalises.

Latents have the shape that the transformer takes, ``[128, H / 16, W / 16]``: squares of 2 x 2 latents of the VAE,
normalised by the statistics of its batch norm. Every one is a token.
"""

import math

import numpy as np

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines.spec import Geometry, ModelSpec, References, Settings, Vae, falling_sigmas

SIDE = 2
"""Latents of the VAE along a side of a square."""
_FEW_STEPS, _MANY_STEPS = 10, 200
_LARGE = 4300
"""Number of image tokens above which the shift does not depend on the number of steps."""
_REFERENCE_PIXELS = 1024 * 1024
"""Number of pixels above which a reference is scaled down."""
_MIN_SIDE, _MAX_RATIO = 64, 8
"""Smallest side of a reference in pixels, and largest ratio of its sides, that the stock pipeline takes."""


def _geometry(vae: Settings) -> Geometry:
    halvings = len(vae["block_out_channels"]) - 1
    return Geometry(vae["latent_channels"] * SIDE**2, 2**halvings * SIDE)


def _shift(image_tokens: int, num_steps: int, _scheduler: Settings) -> float:
    """Return the shift, interpolated between lines fitted at 10 and at 200 steps. Source: the stock pipeline."""
    many = 0.00016927 * image_tokens + 0.45666666
    if image_tokens > _LARGE:
        return many
    few = 8.73809524e-05 * image_tokens + 1.89833333
    slope = (many - few) / (_MANY_STEPS - _FEW_STEPS)
    return slope * num_steps + (many - _MANY_STEPS * slope)


def _sigmas(num_steps: int, scheduler: Settings) -> np.ndarray | None:
    return None if scheduler.get("use_flow_sigmas") else falling_sigmas(num_steps, scheduler)


def reference_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width that a reference is scaled to: its own, or an area of about 1024 x 1024 pixels.

    Raises :class:`ConfigError` for a reference that the stock pipeline does not take. Source: its image processor.
    """
    height, width = size
    if min(size) < _MIN_SIDE or max(size) > _MAX_RATIO * min(size):
        raise ConfigError(
            f"a reference of {height} x {width} pixels (height x width): this model takes sides of at least {_MIN_SIDE}"
            f" pixels, the longer at most {_MAX_RATIO} times the shorter; crop or scale it"
        )
    if height * width <= _REFERENCE_PIXELS:
        return size
    scale = math.sqrt(_REFERENCE_PIXELS / (width * height))
    return int(height * scale), int(width * scale)


SPEC = ModelSpec(
    pipeline_classes=("Flux2KleinPipeline",),
    vaes={
        "AutoencoderKLFlux2": Vae(
            _geometry, {"latent_channels": 32, "block_out_channels": (128, 256, 512, 512)}, posterior=True
        )
    },
    transformer_class="Flux2Transformer2DModel",
    transformer_defaults={"in_channels": 128, "joint_attention_dim": 15360},
    patch=lambda _: (1, 1, 1),
    text_width=lambda transformer: transformer["joint_attention_dim"],
    takes_negative=False,
    unguided_settings={"is_distilled": "a distilled model"},
    shift=_shift,
    always_shifts=True,
    stock_sigmas=_sigmas,
    references=References(most=8, pipeline_class="Flux2KleinPipeline", token_size=reference_size),
)
