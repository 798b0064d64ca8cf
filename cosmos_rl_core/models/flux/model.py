"""FLUX.1 as a velocity field."""

import torch
from diffusers import FluxPipeline
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._media import ImageModel
from cosmos_rl_core.models._packing import SIDE, exact_time, pack, unpack


class Flux(ImageModel):
    """FLUX.1. Conditioning: ``prompt_embeds`` and ``pooled_prompt_embeds``."""

    stock_class = FluxPipeline

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        embeds, pooled, _ = self.pipeline.encode_prompt(
            prompt, prompt, device=self._device, max_sequence_length=max_prompt_length
        )
        return {"prompt_embeds": embeds[0].cpu(), "pooled_prompt_embeds": pooled[0].cpu()}

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict the velocity: the transformer reads tokens of 2 x 2 latents, and t itself in float32."""
        batch, _, height, width = x_t.shape
        texts = conditioning["prompt_embeds"]
        takes_guidance = self._transformer_config["guidance_embeds"]
        guidance = x_t.new_full((batch,), self.embedded_guidance_scale, dtype=torch.float32)
        # Each token's position: 0, its row and its column.
        axes = (torch.arange(count, device=x_t.device) for count in (1, height // SIDE, width // SIDE))
        time = t.to(torch.float32)
        with exact_time(self.transformer.get_submodule("time_text_embed"), 1000 * time):
            tokens = self.transformer(
                hidden_states=pack(x_t),
                timestep=time,
                guidance=guidance if takes_guidance else None,
                encoder_hidden_states=texts,
                pooled_projections=conditioning["pooled_prompt_embeds"],
                txt_ids=texts.new_zeros(texts.shape[1], 3),
                img_ids=torch.cartesian_prod(*axes).to(x_t.dtype),
                return_dict=False,
            )[0].float()
        return unpack(tokens, height, width)


load = Flux
