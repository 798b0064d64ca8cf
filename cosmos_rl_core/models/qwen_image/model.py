"""Qwen-Image as a velocity field."""

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._media import VideoModel
from cosmos_rl_core.models._packing import SIDE, exact_time, pack, unpack


class QwenImage(VideoModel):
    """Qwen-Image. Its VAE encodes videos; an image is one frame.

    Conditioning: ``prompt_embeds``, one for each token of the text, and ``prompt_embeds_mask`` in batches of unequal
    lengths.
    """

    stock_class = QwenImagePipeline

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        embeds, _ = self.pipeline.encode_prompt(prompt, device=self._device, max_sequence_length=max_prompt_length)
        return {"prompt_embeds": embeds[0].cpu()}

    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode one frame a sample: ``[B, 1, height, width, 3]`` to ``[B, C, H, W]``."""
        return super().encode_media(pixels)[:, :, 0]

    def encode_posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mode and standard deviation of the posterior of one frame a sample, each ``[B, C, H, W]``."""
        mode, deviation = super().encode_posterior(pixels)
        return mode[:, :, 0], deviation[:, :, 0]

    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, C, H, W]`` to ``[B, 1, height, width, 3]``."""
        return super().decode(latents[:, :, None])

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict from tokens of 2 x 2 latents; the transformer gets t itself in float32."""
        batch, _, height, width = x_t.shape
        time = t.to(torch.float32)
        with exact_time(self.transformer.get_submodule("time_text_embed"), time):
            tokens = self.transformer(
                hidden_states=pack(x_t),
                timestep=time,
                encoder_hidden_states=conditioning["prompt_embeds"],
                encoder_hidden_states_mask=conditioning.get("prompt_embeds_mask"),
                img_shapes=[[(1, height // SIDE, width // SIDE)]] * batch,
                return_dict=False,
            )[0].float()
        return unpack(tokens, height, width)

    def guide(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Combine both predictions, then scale each token to the norm of its conditional prediction."""
        combined = pack(super().guide(conditional, unconditional, guidance_scale))
        norm = pack(conditional).norm(dim=-1, keepdim=True)
        return unpack(combined * (norm / combined.norm(dim=-1, keepdim=True)), *conditional.shape[2:])


load = QwenImage
