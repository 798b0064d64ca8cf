"""Stable Diffusion 3 and 3.5 as a velocity field."""

from functools import cached_property
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._media import ImageModel


class StableDiffusion3(ImageModel):
    """Stable Diffusion 3. Conditioning: ``prompt_embeds`` and ``pooled_prompt_embeds``."""

    stock_class = StableDiffusion3Pipeline

    @cached_property
    def _texts(self) -> Any:
        """Return the stock pipeline that encodes prompts.

        Without T5 it replaces the embeddings of T5's tokens by zeros, whose width the transformer's settings give.
        """
        if self.pipeline.text_encoder_3 is not None:
            return self.pipeline
        parts = self.pipeline.components | {"transformer": _loading.empty_transformer(self._path)}
        return StableDiffusion3Pipeline(**parts)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        """Return the embeddings of CLIP's 77 tokens, then of ``max_prompt_length`` tokens of T5: zeros without T5."""
        embeds, _, pooled, _ = self._texts.encode_prompt(
            prompt,
            prompt,
            prompt,
            device=self._device,
            do_classifier_free_guidance=False,
            max_sequence_length=max_prompt_length,
        )
        return {"prompt_embeds": embeds[0].cpu(), "pooled_prompt_embeds": pooled[0].cpu()}

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict the velocity; the transformer gets ``1000 t`` in float32, never rounded to a whole number."""
        return self.transformer(
            hidden_states=x_t,
            timestep=(t * self.scheduler.config.num_train_timesteps).to(torch.float32),
            encoder_hidden_states=conditioning["prompt_embeds"],
            pooled_projections=conditioning["pooled_prompt_embeds"],
            return_dict=False,
        )[0].float()


load = StableDiffusion3
