"""Passes through the modules of a pipeline, and what is counted of them: values without torch."""

from typing import Literal

from cosmos_rl_core.config.base import Section
from cosmos_rl_core.config.policy import LoraConfig


class Pass(Section):
    """One pass through the transformer or the VAE of a pipeline."""

    kind: Literal["training", "forward", "decoding", "encoding"]
    """``training`` has a backward pass, ``forward`` has no gradient; ``decoding`` and ``encoding`` are the VAE's."""
    size: tuple[int, int]
    """Height and width in pixels."""
    frames: int
    batch: int
    """Number of samples."""
    max_prompt_length: int = 0
    pictures: tuple[tuple[int, int], ...] = ()
    """Height and width of each reference of a prompt, in pixels."""
    half: bool = False
    """Whether autocast computes in bfloat16."""
    guided: bool = False
    """Whether a velocity takes two predictions, one after the other."""
    trains_unconditional: bool = True
    """Whether both have a gradient."""
    checkpointing: bool = False
    """Whether the backward pass computes activations again."""
    lora: LoraConfig | None = None
    """Settings of the trained adapter; None if all weights train."""
    below: LoraConfig | None = None
    """Settings of the frozen adapter below it."""


class Footprint(Section):
    """The memory and arithmetic of a pass on one device."""

    peak_bytes: int
    """Most bytes at the same time of what the pass makes: saved tensors, temporary ones, results. Its inputs, weights,
    casts of weights and kept gradients are not among them."""
    flops: int
    """Operations, a multiplication and an addition counted as two; 0 for ``training``, where none are counted."""
