"""The facts of a model that plans and checks need: a value that is imported without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model plugin states about a family of pipelines; its ``__init__.py`` assigns one to ``SPEC``."""

    pipeline_classes: tuple[str, ...]
    """Values of ``_class_name`` in ``model_index.json``. Two plugins cannot claim the same class."""
    vae_classes: tuple[str, ...]
    """Classes that the pipeline's VAE can have."""
    refused_settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of the index or of the transformer that must be absent or off, each with what it would mean."""
    mask_channels: int = 0
    """Channels that the transformer takes besides those of the latents."""
    guardrail_package: str | None = None
    """Package of the safety checker that the stock pipeline insists on. ``load`` then takes the component
    :data:`cosmos_rl_core.models._base.GUARDRAIL`."""
    guidance_offset: float = 0
    """How much less than ours the ``guidance_scale`` of the stock pipeline is."""
    max_given_frames: int = 0
    """How many latent frames may be given at the start of a video. Above 0 ``velocity`` takes
    :func:`cosmos_rl_core.models._base.given_frames`."""
    stock_multiple: int = 1
    """Pixels. The stock pipeline refuses sides that are no multiple of it, whatever the VAE's own factor."""
    shifts_by_size: bool = False
    """Whether the stock pipeline tells its scheduler how large the image is."""
    frozen_prefix: str | None = None
    """Module of the transformer that text embeddings pass through first, and that makes them far smaller. Its output
    may be stored in their place: ``load`` then takes :data:`cosmos_rl_core.models._base.PREFIX`, and ``velocity`` takes
    that output."""
    takes_negative_prompt: bool = True
    """Whether the stock call takes a ``negative_prompt``."""
    takes_instruction: bool = False
    """Whether the stock call takes a ``complex_human_instruction``. The loaded model then has one to set."""
