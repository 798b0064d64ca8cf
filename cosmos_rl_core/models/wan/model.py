"""Wan 2.1 as a velocity field."""

import torch
import torch.distributed as dist
from diffusers import WanPipeline
from torch import Tensor

from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._video import VideoModel
from cosmos_rl_core.models.wan.split import split


class Wan(VideoModel):
    """Wan 2.1. Conditioning: ``prompt_embeds``, zero after the last token."""

    stock_class = WanPipeline

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        embeds, _ = self.pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_prompt_length, device=self._device
        )
        return {"prompt_embeds": embeds[0].cpu()}

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict; the transformer gets ``1000 t`` in float32, never rounded to a whole number."""
        return self.transformer(
            hidden_states=x_t,
            timestep=(t * self.scheduler.config.num_train_timesteps).to(torch.float32),
            encoder_hidden_states=conditioning["prompt_embeds"],
            return_dict=False,
        )[0].float()

    def split_sequence(self, group: dist.ProcessGroup) -> None:
        """Share tokens with :func:`.split.split`."""
        split(self.transformer, group)


load = Wan
