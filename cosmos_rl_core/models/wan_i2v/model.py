"""Wan 2.1 I2V as a velocity field."""

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._media import pixels_to_unit
from cosmos_rl_core.models._pictures import scaled
from cosmos_rl_core.models._wan import WanModel
from cosmos_rl_core.models.wan_i2v import CONDITION, FRAMES_OF_A_LATENT, PICTURE_EMBEDS


class WanImageToVideo(WanModel):
    """Wan 2.1 I2V. Conditioning: ``prompt_embeds``, zero after the last token, ``condition`` and ``picture_embeds``."""

    stock_class = WanImageToVideoPipeline

    def _encode_references(self, references: Sequence[np.ndarray], size: tuple[int, int], frames: int) -> Entries:
        """Encode the picture, stretched to the size of the video, and grey frames after it. CLIP reads it unscaled."""
        (reference,) = references
        picture = torch.from_numpy(scaled(reference[0], size)).to(self._device)
        video = torch.zeros(1, 3, frames, *size, device=self._device)
        video[:, :, 0] = pixels_to_unit(picture).permute(2, 0, 1)
        mean, inverse_std = self._statistics()
        latents = ((self._vae.encode(video).latent_dist.mode() - mean) * inverse_std)[0]
        mask = latents.new_zeros(FRAMES_OF_A_LATENT, *latents.shape[1:])
        mask[:, 0] = 1
        entries = {CONDITION: torch.cat([mask, latents]).cpu()}
        if self._transformer_config["image_dim"] is not None:
            embeds = self.pipeline.encode_image(Image.fromarray(reference[0]), self._device)
            entries[PICTURE_EMBEDS] = embeds[0].cpu()
        return entries

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict the velocity; the transformer gets ``1000 t`` in float32, never rounded."""
        return self.transformer(
            hidden_states=torch.cat([x_t, conditioning[CONDITION]], dim=1),
            timestep=(t * self.scheduler.config.num_train_timesteps).to(torch.float32),
            encoder_hidden_states=conditioning["prompt_embeds"],
            encoder_hidden_states_image=conditioning.get(PICTURE_EMBEDS),
            return_dict=False,
        )[0].float()


load = WanImageToVideo
