"""What a model plugin offers: a pipeline family as a velocity field on latents.

One convention everywhere: ``t`` in [0, 1], ``x_t = (1 - t) x_0 + t noise``, ``velocity = noise - x_0``; t and sigma are
the same number and never in a half type. Scaling of timesteps, packing, masks and latent normalisation live in the
plugin and nowhere else.

A plugin is a folder. Its ``__init__.py`` assigns a :class:`cosmos_rl_core.models._spec.ModelSpec` to ``SPEC``; plans
import it, so it imports no torch. Its ``model.py`` has a function ``load``. Where ``from_pretrained`` alone does not
load the stock pipeline, it also has a function ``load_stock(path, guardrail, device, transformer)``, which puts
``transformer`` in the place of the directory's own unless that is None.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from cosmos_rl_core.sampling.schedule import Schedule

Conditioning = dict[str, Tensor]
"""What the transformer needs of a prompt, by name. One prompt: no batch dimension; stacked for a batch."""

CONDITIONAL_LATENTS, CONDITIONAL_MASK = "conditional_latents", "conditional_mask"
"""Names of what a conditioning holds where a video's first latent frames are given: their normalised latents, ``[C, T,
H, W]`` with 0 after them, and ``[1, T, 1, 1]``, 1 at given frames and 0 at those to generate. Both float32."""

COMPONENTS = ("transformer", "vae", "text")
"""What ``load`` can be asked for. Text encoders are needed by `embed` alone, the VAE by `rollout`, `encode` and
`finetune`."""

EMPTY_TRANSFORMER = "empty transformer"
"""In the place of ``transformer``: its weights on the meta device, for who reads them by himself; buffers are real."""

GUARDRAIL = "guardrail"
"""One more component, of those plugins alone that have a ``guardrail_package``; needed with the text encoders, where it
refuses prompts, and with the VAE, where it looks at what was decoded."""

PREFIX = "prefix"
"""One more component, of those plugins alone that have a ``frozen_prefix``: with it ``encode_prompts`` gives what comes
out of that module, float32, under a name of its own. For policies that do not train it: `embed` stores that instead."""


class NotFiniteError(ArithmeticError):
    """Decoded pixels of at least one sample of a batch are NaN or infinite."""


class Model(Protocol):
    """A loaded pipeline, or the parts of it that a stage asked for."""

    transformer: nn.Module
    scheduler: Any
    """The pipeline's own diffusers scheduler: the source of the noise schedule."""
    negative_prompt: str
    """What guidance steers away from if nobody says otherwise: the stock pipeline's own default."""
    embedded_guidance_scale: float
    """The guidance that the transformer is told, if it takes one as an input. Set it before ``velocity``."""

    def encode_prompts(self, prompts: list[str], max_prompt_length: int) -> list[Conditioning]:
        """Text embeddings of each prompt, unbatched, on the CPU, as the stock pipeline computes them one by one."""
        ...

    def encode_negative(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """Embeddings of the negative prompt, and of the empty one where a text is dropped, as the stock pipeline
        computes those of its ``negative_prompt``: unbatched, on the CPU."""
        ...

    def latent_shape(self, size: tuple[int, int], frames: int) -> tuple[int, ...]:
        """Shape of one sample's latents, without batch: ``[C, H, W]`` or ``[C, T, H, W]``.

        ``size`` is height and width in pixels.
        Raises :class:`ConfigError` on a size or a number of frames that it cannot do.
        """
        ...

    def schedule(self, num_steps: int, size: tuple[int, int], frames: int) -> Schedule:
        """The noise levels of ``num_steps`` steps of the pipeline's own scheduler, for media of that size.

        Raises as :func:`cosmos_rl_core.sampling.schedule.schedule_of`.
        """
        ...

    def encode_media(self, pixels: Tensor) -> Tensor:
        """Uint8 RGB ``[B, frames, height, width, 3]`` to normalised float32 latents ``[B, *latent_shape]``.

        They are the mode of the posterior, not a draw from it.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Normalised latents ``[B, *latent_shape]`` to uint8 RGB ``[B, frames, height, width, 3]``.

        Raises :class:`NotFiniteError` if a decoded value is not finite.
        """
        ...

    def guide(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Combine two velocities as the stock pipeline does at ``guidance_scale`` above 1."""
        ...

    def split_sequence(self, group: dist.ProcessGroup) -> None:
        """Share the tokens of every forward pass with the other processes of ``group``, which do the same.

        Only models whose spec has ``context_parallel`` can. Call it after LoRA is added.
        """
        ...

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Velocity at ``x_t`` and ``t`` (float ``[B]`` in [0, 1]) for batched conditioning: float32, like ``x_t``.

        Where frames are given, ``x_t`` counts at the others alone, and the velocity is 0: given frames do not move.
        """
        ...


class ModelPlugin(Protocol):
    """The ``model.py`` of a model plugin."""

    def load(self, path: str, components: tuple[str, ...], device: torch.device) -> Model:
        """Load the named ones of :data:`COMPONENTS` from the directory ``path``: float32, frozen, in eval mode."""
        ...


def stack(conditionings: list[Conditioning], device: torch.device) -> Conditioning:
    """Batch unbatched conditionings: ``[...]`` each to ``[B, ...]`` on ``device``.

    Texts of unequal length are padded with zeros at the end; ``<name>_mask``, 1 at tokens, is then added for each. All
    other dimensions must be equal.
    """
    batch: Conditioning = {}
    for name in conditionings[0]:
        tensors = [conditioning[name] for conditioning in conditionings]
        if len({tensor.shape for tensor in tensors}) == 1:
            batch[name] = torch.stack(tensors)
        else:
            batch[name] = pad_sequence(tensors, batch_first=True)
            tokens = [torch.ones(len(tensor), dtype=torch.long, device=tensor.device) for tensor in tensors]
            batch[f"{name}_mask"] = pad_sequence(tokens, batch_first=True)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def given_frames(latents: Tensor, num_latent_frames: int) -> Conditioning:
    """What a conditioning holds besides, for a video of ``num_latent_frames`` that begins with ``latents``.

    ``latents`` are the n given frames, normalised, ``[C, n, H, W]``; n = 0 gives none of them: text to video.
    Raises ``ValueError`` if no frame is left to generate.
    """
    num_given = latents.shape[1]
    if num_given >= num_latent_frames:
        raise ValueError(f"{num_given} given latent frames leave none of {num_latent_frames} to generate")
    padding = (0, 0, 0, 0, 0, num_latent_frames - num_given)
    mask = latents.new_zeros(1, num_latent_frames, 1, 1, dtype=torch.float32)
    mask[:, :num_given] = 1
    return {CONDITIONAL_LATENTS: nn.functional.pad(latents.float(), padding), CONDITIONAL_MASK: mask}


def generated(conditioning: Conditioning) -> Tensor | None:
    """1 at frames to generate and 0 at given ones, broadcasts to latents; None without given frames.

    It is the mask of losses and log-probabilities.
    """
    return 1 - conditioning[CONDITIONAL_MASK] if CONDITIONAL_MASK in conditioning else None


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
    """Return the guided velocity, by ``model.guide``; ``s = 1`` is one forward and needs no ``negative``.

    The given frames of ``conditioning`` are given to both forwards. Without ``trains_unconditional`` there is no
    gradient through ``v_u``; the values are the same.
    Source: arXiv:2207.12598, in the parametrisation of diffusers, where s = 1 is no guidance.
    """
    conditional = model.velocity(x_t, t, conditioning)
    if guidance_scale == 1:
        return conditional
    if negative is None:
        raise ValueError(f"guidance_scale = {guidance_scale} needs negative conditioning")
    given = {name: conditioning[name] for name in (CONDITIONAL_LATENTS, CONDITIONAL_MASK) if name in conditioning}
    with torch.set_grad_enabled(trains_unconditional and torch.is_grad_enabled()):
        unconditional = model.velocity(x_t, t, negative | given)
    return model.guide(conditional, unconditional, guidance_scale)
