"""The facts of a model that plans and checks need: a value that is imported without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Settings = Mapping[str, Any]
"""The ``config.json`` of a component, with its class's defaults where the file leaves a setting out."""


@dataclass(frozen=True)
class Geometry:
    """How a VAE maps pixels to latents."""

    channels: int
    spatial: int
    """Pixels along a side of one latent."""
    temporal: int | None = None
    """Frames of one latent frame after the first; None: it encodes images only."""


@dataclass(frozen=True)
class Vae:
    """One class of VAE."""

    geometry: Callable[[Settings], Geometry | None]
    """Its geometry from its settings; None if they do not state it."""
    defaults: Settings = field(default_factory=dict)
    """Defaults of the class for the settings that ``geometry`` reads."""


def patch_size(transformer: Settings) -> tuple[int, int, int]:
    """Return latent frames, height and width of one token from the setting ``patch_size``, a number or all three."""
    patch = transformer["patch_size"]
    frames, height, width = (1, patch, patch) if isinstance(patch, int) else patch
    return frames, height, width


def falling_sigmas(num_steps: int, _scheduler: Settings) -> np.ndarray:
    """Return ``num_steps`` levels from 1 to ``1 / num_steps``, evenly spaced, float64."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model plugin states about a family of pipelines; its ``__init__.py`` assigns one to ``SPEC``."""

    pipeline_classes: tuple[str, ...]
    """Values of ``_class_name`` in ``model_index.json``. Two plugins cannot claim the same class."""
    vaes: Mapping[str, Vae]
    """The classes that the pipeline's VAE can have."""
    transformer_class: str
    """The class of the pipeline's transformer."""
    transformer_defaults: Settings = field(default_factory=dict)
    """Defaults of that class for the settings that this spec reads. Older checkpoints leave some out."""
    refused_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the index or of the transformer that must be absent or off, each with what it would mean."""

    patch: Callable[[Settings], tuple[int, int, int]] = patch_size
    """Latent frames, height and width of one token, from the transformer's settings."""
    positions: Callable[[Settings], tuple[int, int, int] | None] = lambda _: None
    """Most tokens along frames, height and width that the transformer has positions for; None: any number."""
    packing: int = 1
    """Side of the square of latents that the pipeline folds into the channels of one token. 1: it folds none."""
    mask_channels: int = 0
    """Channels that the transformer takes besides those of the latents."""
    text_width: Callable[[Settings], int]
    """Numbers of one text token, from the transformer's settings."""
    pooled_width: Callable[[Settings], int] = lambda _: 0
    """Numbers of a prompt besides its tokens."""
    clip_tokenizer: str | None = None
    """Component whose ``model_max_length`` tokens come before the ``max_prompt_length`` tokens of a prompt."""
    max_prompt_length: int | None = None
    """Most text tokens that the stock pipeline takes; None: any number."""
    pads_text: bool = True
    """Whether every prompt has ``max_prompt_length`` tokens; False: as many as its text, and at most that."""
    float32_modules: tuple[str, ...] = ()
    """Modules that the transformer's class keeps float32 in half-precision runs, by a part of their name."""
    context_parallel: bool = False
    """Whether processes can share the tokens of a video; the loaded model then has ``split_sequence``."""

    guardrail_package: str | None = None
    """Package of the safety checker that the stock pipeline insists on. ``load`` then takes the component
    :data:`cosmos_rl_core.models._base.GUARDRAIL`."""
    guidance_argument: Literal["guidance_scale", "true_cfg_scale"] = "guidance_scale"
    """The argument of the stock call that weighs two predictions."""
    guidance_offset: float = 0
    """How much less than our ``guidance_scale`` that argument is."""
    embedded_guidance_scale: float | None = None
    """What transformers with ``guidance_embeds`` are told, by default of the stock call's ``guidance_scale``; None: the
    family has no such transformers."""
    max_given_frames: int = 0
    """How many latent frames may be given at the start of a video. Above 0 ``velocity`` takes
    :func:`cosmos_rl_core.models._base.given_frames`."""
    stock_multiple: int = 1
    """Pixels. The stock pipeline refuses sides that are no multiple of it, whatever the VAE's own factor."""
    max_shift: float | None = None
    """What the stock pipeline takes for the scheduler's ``max_shift`` if its settings have none. None: the pipeline
    does not tell its scheduler how large the image is, so there is no shift by size."""
    always_shifts: bool = False
    """Whether the stock pipeline tells it also to schedulers that do not shift by size. Some refuse that."""
    stock_sigmas: Callable[[int, Settings], np.ndarray | None] = lambda *_: None
    """The noise levels that the stock pipeline hands to its scheduler, from the number of steps and the scheduler's
    settings. None: the scheduler lays out its own."""
    frozen_prefix: str | None = None
    """Module of the transformer that text embeddings pass through first, and that makes them far smaller. Its output
    may be stored in their place: ``load`` then takes :data:`cosmos_rl_core.models._base.PREFIX`, and ``velocity`` takes
    that output."""
    takes_negative_prompt: bool = True
    """Whether the stock call takes a ``negative_prompt``."""
    takes_instruction: bool = False
    """Whether the stock call takes a ``complex_human_instruction``. The loaded model then has one to set."""

    def defaults(self, class_name: str) -> Settings:
        """Return the defaults of a component's class, as far as this spec reads its settings."""
        if class_name == self.transformer_class:
            return self.transformer_defaults
        return self.vaes[class_name].defaults if class_name in self.vaes else {}
