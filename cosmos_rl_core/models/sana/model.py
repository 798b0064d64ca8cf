"""SANA and SANA 1.5 as a velocity field."""

from typing import Any

from diffusers import SanaPipeline
from torch import Tensor

from cosmos_rl_core.models._media import ImageModel
from cosmos_rl_core.models._sana import SanaModel


class Sana(SanaModel, ImageModel):
    """SANA. Conditioning: ``prompt_embeds`` and ``prompt_attention_mask``."""

    stock_class = SanaPipeline

    def _mode(self, encoded: Any) -> Tensor:
        """Return the latents: the encoder has no posterior."""
        return encoded.latent


load = Sana
