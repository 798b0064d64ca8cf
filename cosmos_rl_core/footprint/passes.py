"""Passes through the modules of a pipeline, and their counted memory and operations: values without torch."""

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
    """Whether both predictions have a gradient; otherwise only the conditional one does."""
    checkpointing: bool = False
    """Whether the backward pass computes activations again."""
    lora: LoraConfig | None = None
    """Settings of the trained adapter; None if all weights train."""
    below: LoraConfig | None = None
    """Settings of the frozen adapter below it."""


class Footprint(Section):
    """The memory and arithmetic of a pass on one device."""

    peak_bytes: int
    """Largest number of bytes, at one time, of tensors that the pass makes: saved ones, temporary ones and results.
    Inputs, weights, casts of weights and kept gradients do not count."""
    flops: int
    """Number of operations; a multiplication and an addition are two. 0 for ``training``, where none are counted."""
