"""SANA and SANA 1.5 as a velocity field."""

import torch
from diffusers import SanaPipeline
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._adapter import Adapter
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._sana import TakesInstruction, velocity
from cosmos_rl_core.pipelines import checkpoints


class Sana(TakesInstruction, Adapter):
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds`` and ``prompt_attention_mask``."""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        checkpoints.check(path)
        super().__init__(_loading.load_pipeline(SanaPipeline, path, components, device), path, device)

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """One frame a sample: ``[B, 1, height, width, 3]`` to ``[B, C, H, W]``. The encoder has no posterior."""
        vae = self._vae
        images = _loading.pixels_to_unit(pixels[:, 0].to(self._device)).permute(0, 3, 1, 2)
        return vae.encode(images).latent * vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """``[B, C, H, W]`` to ``[B, 1, height, width, 3]``."""
        vae = self._vae
        latents = latents.to(self._device, torch.float32) / vae.config.scaling_factor
        pixels = _loading.unit_to_pixels(vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 1)[:, None].contiguous()

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed ``1000 t`` times its own scale, never a rounded number as by the stock scheduler."""
        timestep = t * self.scheduler.config.num_train_timesteps * self._transformer_config["timestep_scale"]
        return velocity(self.transformer, x_t, timestep, conditioning)


def load(path: str, components: tuple[str, ...], device: torch.device) -> Sana:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Raises :class:`ConfigError` on distilled models.
    """
    return Sana(path, components, device)
