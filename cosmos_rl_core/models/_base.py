"""What a model plugin offers: a pipeline family as a velocity field on latents.

One convention everywhere: ``t`` in [0, 1], ``x_t = (1 - t) x_0 + t noise``, ``velocity = noise - x_0``; t and sigma are
the same number and never in a half type. Scaling of timesteps, packing, masks and latent normalisation live in the
plugin and nowhere else.

A plugin file has ``PIPELINE_CLASSES`` (values of ``_class_name`` in ``model_index.json``) and a function ``load``.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

Conditioning = dict[str, Tensor]
"""What the transformer needs of a prompt, by name. One prompt: no batch dimension; stacked for a batch."""

COMPONENTS = ("transformer", "vae", "text")
"""What ``load`` can be asked for. Text encoders are needed by `embed` alone, the VAE by `rollout`, `encode` and
`finetune`."""


class Model(Protocol):
    """A loaded pipeline, or the parts of it that a stage asked for."""

    transformer: nn.Module
    scheduler: Any
    """The pipeline's own diffusers scheduler: the source of the noise schedule."""

    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """Text embeddings of each prompt, unbatched, on the CPU, as the stock pipeline computes them one by one."""
        ...

    def latent_shape(self, size: tuple[int, int], frames: int) -> tuple[int, ...]:
        """Shape of one sample's latents, without batch: ``[C, H, W]`` or ``[C, T, H, W]``.

        ``size`` is height and width in pixels.
        Raises :class:`ConfigError` on a size or a number of frames that it cannot do.
        """
        ...

    def encode_media(self, pixels: Tensor) -> Tensor:
        """Uint8 RGB ``[B, frames, height, width, 3]`` to normalised float32 latents ``[B, *latent_shape]``.

        They are the mode of the posterior, not a draw from it.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents ``[B, *latent_shape]`` to uint8 RGB ``[B, frames, height, width, 3]``."""
        ...

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Velocity at ``x_t`` and ``t`` (float ``[B]`` in [0, 1]) for batched conditioning: float32, like ``x_t``."""
        ...


class ModelPlugin(Protocol):
    """The module of a model plugin."""

    PIPELINE_CLASSES: tuple[str, ...]

    def load(self, path: str, components: tuple[str, ...], device: torch.device) -> Model:
        """Load the named ones of :data:`COMPONENTS` from the directory ``path``: float32, frozen, in eval mode."""
        ...


def stack(conditionings: list[Conditioning], device: torch.device) -> Conditioning:
    """Batch unbatched conditionings of equal shapes: ``[...]`` each to ``[B, ...]`` on ``device``."""
    return {name: torch.stack([c[name] for c in conditionings]).to(device) for name in conditionings[0]}


def guided_velocity(
    model: Model,
    x_t: Tensor,
    t: Tensor,
    conditioning: Conditioning,
    negative: Conditioning | None,
    guidance_scale: float,
    *,
    trains_unconditional: bool = True,
) -> Tensor:
    """Classifier-free guidance, ``v_u + s (v_c - v_u)``; ``s = 1`` is one forward and needs no ``negative``.

    Without ``trains_unconditional`` there is no gradient through ``v_u``; the values are the same.
    Source: arXiv:2207.12598, in the parametrisation of diffusers, where s = 1 is no guidance.
    """
    conditional = model.velocity(x_t, t, conditioning)
    if guidance_scale == 1:
        return conditional
    if negative is None:
        raise ValueError(f"guidance_scale = {guidance_scale} needs negative conditioning")
    with torch.set_grad_enabled(trains_unconditional and torch.is_grad_enabled()):
        unconditional = model.velocity(x_t, t, negative)
    return unconditional + guidance_scale * (conditional - unconditional)
