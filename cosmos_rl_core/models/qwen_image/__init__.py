"""Qwen-Image: text to image, Qwen2.5-VL's text of any length, 4-D latents in tokens of 2 x 2."""

from cosmos_rl_core.models._qwen_image_spec import QWEN_IMAGE

SPEC = QWEN_IMAGE
