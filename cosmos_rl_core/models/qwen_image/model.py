"""Qwen-Image as a velocity field."""

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._adapter import Adapter
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._packing import SIDE, exact_time, pack, unpack
from cosmos_rl_core.pipelines import checkpoints


class QwenImage(Adapter):
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds``, as many as the text has
    tokens, and ``prompt_embeds_mask`` in batches of unequal lengths.
    """

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        checkpoints.check(path)
        super().__init__(_loading.load_pipeline(QwenImagePipeline, path, components, device), path, device)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        embeds, _ = self._pipeline.encode_prompt(prompt, device=self._device, max_sequence_length=max_prompt_length)
        return {"prompt_embeds": embeds[0].cpu()}

    @torch.no_grad()
    def encode_media(self, pixels: Tensor) -> Tensor:
        """Encode one frame a sample: ``[B, 1, height, width, 3]`` to ``[B, C, H, W]``."""
        images = _loading.pixels_to_unit(pixels.to(self._device)).permute(0, 4, 1, 2, 3)
        mean, inverse_std = self._statistics()
        return ((self._vae.encode(images).latent_dist.mode() - mean) * inverse_std)[:, :, 0]

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode ``[B, C, H, W]`` to ``[B, 1, height, width, 3]``."""
        mean, inverse_std = self._statistics()
        latents = latents.to(self._device, torch.float32)[:, :, None] / inverse_std + mean
        pixels = _loading.unit_to_pixels(self._vae.decode(latents, return_dict=False)[0])
        return pixels.permute(0, 2, 3, 4, 1).contiguous()

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict from tokens of 2 x 2 latents. The transformer is fed t itself, float32."""
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
        """Combine both predictions, then give each token the norm that its conditional prediction has."""
        combined = pack(super().guide(conditional, unconditional, guidance_scale))
        norm = pack(conditional).norm(dim=-1, keepdim=True)
        return unpack(combined * (norm / combined.norm(dim=-1, keepdim=True)), *conditional.shape[2:])

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Return mean and inverse standard deviation of the latents by channel, ``[1, C, 1, 1, 1]``."""
        mean, std = (
            torch.tensor(self._vae.config[name], dtype=torch.float32, device=self._device).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        return mean, 1.0 / std


def load(path: str, components: tuple[str, ...], device: torch.device) -> QwenImage:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Raises :class:`ConfigError` on distilled, editing and layered models.
    """
    return QwenImage(path, components, device)
