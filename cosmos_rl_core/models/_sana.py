"""What SANA's image and video pipelines share: Gemma's text and the transformer's call."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core import pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import Conditioning


def check(path: str, vae_class: str) -> None:
    """Raise :class:`ConfigError` on a VAE other than ``vae_class``, or a transformer that is told the guidance.

    The latter is SANA-Sprint's, a distilled model with a pipeline class of its own.
    """
    found = pipelines.read_json(path, "vae", "config.json")["_class_name"]
    if found != vae_class:
        raise ConfigError(f"{path!r} has the VAE {found}; supported here: {vae_class}")
    if pipelines.read_json(path, "transformer", "config.json").get("guidance_embeds"):
        raise ConfigError(f"{path!r}: the transformer has guidance_embeds, so it is a distilled model; not supported")


@torch.no_grad()
def encode_prompt(
    pipeline: Any, prompt: str, max_prompt_length: int, instruction: Sequence[str] | None, device: torch.device
) -> Conditioning:
    """Embeddings ``[max_prompt_length, D]`` and their mask, 1 at tokens, on the CPU.

    A prompt comes after the ``instruction``, if None the stock pipeline's own, of whose embeddings the first and the
    last are kept; the empty prompt, which is the negative one, comes without.
    """
    given = _stock_instruction(type(pipeline)) if instruction is None else list(instruction)
    embeds, mask, _, _ = pipeline.encode_prompt(
        prompt,
        do_classifier_free_guidance=False,
        device=device,
        max_sequence_length=max_prompt_length,
        complex_human_instruction=given if prompt else None,
    )
    return {"prompt_embeds": embeds[0].cpu(), "prompt_attention_mask": mask[0].cpu()}


def velocity(transformer: Any, x_t: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
    """The transformer's answer in float32, without the variance that some checkpoints predict besides."""
    answer = transformer(
        hidden_states=x_t,
        timestep=timestep.to(torch.float32),
        encoder_hidden_states=conditioning["prompt_embeds"],
        # the argument `attention_mask` is accepted too and ignored by every block
        encoder_attention_mask=conditioning["prompt_attention_mask"],
        return_dict=False,
    )[0].float()
    return answer[:, : x_t.shape[1]]


def _stock_instruction(pipeline_class: type) -> list[str]:
    """What the stock call puts before every prompt: the default of its argument, so that no copy of it can differ."""
    return inspect.signature(pipeline_class.__call__).parameters["complex_human_instruction"].default
