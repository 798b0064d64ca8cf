"""Stable Diffusion 3 and 3.5 as a velocity field."""

from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._image import ImageAdapter
from cosmos_rl_core.pipelines import checkpoints


class StableDiffusion3(ImageAdapter):
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds`` and ``pooled_prompt_embeds``."""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        checkpoints.check(path)
        super().__init__(_loading.load_pipeline(StableDiffusion3Pipeline, path, components, device), path, device)
        self._texts = self._pipeline
        if "text" in components and self._pipeline.text_encoder_3 is None:
            # What stands for T5's tokens is as wide as the transformer's settings say.
            parts = self._pipeline.components | {"transformer": _loading.empty_transformer(path)}
            self._texts = StableDiffusion3Pipeline(**parts)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        """CLIP keeps its own 77 tokens; ``max_prompt_length`` is T5's, 0 where it is absent."""
        encoded: Any = self._texts.encode_prompt(
            prompt,
            prompt,
            prompt,
            device=self._device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_prompt_length,
        )
        embeds, _, pooled, _ = encoded
        return {"prompt_embeds": embeds[0].cpu(), "pooled_prompt_embeds": pooled[0].cpu()}

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed ``1000 t`` as float32, never a rounded number."""
        return self.transformer(
            hidden_states=x_t,
            timestep=(t * self.scheduler.config.num_train_timesteps).to(torch.float32),
            encoder_hidden_states=conditioning["prompt_embeds"],
            pooled_projections=conditioning["pooled_prompt_embeds"],
            return_dict=False,
        )[0].float()


def load(path: str, components: tuple[str, ...], device: torch.device) -> StableDiffusion3:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode."""
    return StableDiffusion3(path, components, device)
