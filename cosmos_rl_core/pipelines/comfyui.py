"""Names of a transformer's modules in LoRA files that ComfyUI reads, as functions that a model's spec names.

Source: ``model_lora_keys_unet`` in ``comfy/lora.py`` of ComfyUI, and the tables of ``comfy/utils.py`` that it reads.
"""

import re
from collections.abc import Callable

Name = Callable[[str], str | None]
"""Function from a module of the transformer to its name in ComfyUI's files; None if ComfyUI reads no adapter of it."""
PREFIX = "transformer."
"""Beginning of a module's name in LoRA files of diffusers."""
JOINT_ATTENTION = r"(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
FEED_FORWARD = r"net\.(0\.proj|2)"
"""Linear modules of diffusers' attention of two streams, and of its feed-forward layers."""


def as_diffusers(*modules: str) -> Name:
    """Return a function for modules that ComfyUI reads by diffusers' names: all that fit one regular expression."""
    fits = re.compile("|".join(modules))
    return lambda module: f"{PREFIX}{module}" if fits.fullmatch(module) else None
