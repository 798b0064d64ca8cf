"""Qwen-Image-Edit Plus (2509, 2511): text and pictures to image. Qwen2.5-VL reads both.

Everything else is Qwen-Image's. The pipeline scales every picture to two sizes of its own aspect ratio, up or down: one
that the text encoder reads, and one that the VAE encodes.
"""

import math
from dataclasses import replace

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._qwen_image_spec import QWEN_IMAGE
from cosmos_rl_core.pipelines.spec import References

TEXT_PIXELS = 384 * 384
"""Pixels to which a reference is scaled for the text encoder."""
VAE_PIXELS = 1024 * 1024
"""Pixels to which a reference is scaled for the VAE."""
_MULTIPLE = 32
"""Number of pixels that divides each side of both scaled pictures."""
_MAX_RATIO = 200
"""Largest ratio of the longer side of a reference to its shorter side that the text encoder's processor takes."""


def text_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the picture that the text encoder reads. Raises like :func:`vae_size`."""
    return _of_area(size, TEXT_PIXELS)


def vae_size(size: tuple[int, int]) -> tuple[int, int]:
    """Return height and width of the picture that the VAE encodes.

    Raises :class:`ConfigError` for a picture that the stock pipeline does not take.
    """
    return _of_area(size, VAE_PIXELS)


def _of_area(size: tuple[int, int], pixels: int) -> tuple[int, int]:
    """Return height and width of a picture of about ``pixels`` with the aspect ratio of ``size``.

    Raises :class:`ConfigError` for a ratio that the text encoder's processor does not take. Source: the stock
    calculate_dimensions.
    """
    height, width = size
    if min(size) < 1 or max(size) > _MAX_RATIO * min(size):
        raise ConfigError(
            f"a reference of {height} x {width} pixels (height x width): this model takes a longer side of at most "
            f"{_MAX_RATIO} times the shorter; crop it"
        )
    ratio = width / height
    wide = math.sqrt(pixels * ratio)
    return round(wide / ratio / _MULTIPLE) * _MULTIPLE, round(wide / _MULTIPLE) * _MULTIPLE


SPEC = replace(
    QWEN_IMAGE,
    pipeline_classes=("QwenImageEditPlusPipeline",),
    refused_settings={
        setting: meaning for setting, meaning in QWEN_IMAGE.refused_settings.items() if setting != "zero_cond_t"
    },
    references=References(
        fewest=1,
        most=3,
        pipeline_class="QwenImageEditPlusPipeline",
        read_with_text=True,
        token_size=vae_size,
    ),
)
