"""FLUX.1 as a velocity field."""

import torch
from diffusers import FluxPipeline
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._image import ImageAdapter
from cosmos_rl_core.models._packing import SIDE, exact_time, pack, unpack
from cosmos_rl_core.pipelines import checkpoints


class Flux(ImageAdapter):
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds`` and ``pooled_prompt_embeds``."""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        checkpoints.check(path)
        super().__init__(_loading.load_pipeline(FluxPipeline, path, components, device), path, device)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        embeds, pooled, _ = self._pipeline.encode_prompt(
            prompt, prompt, device=self._device, max_sequence_length=max_prompt_length
        )
        return {"prompt_embeds": embeds[0].cpu(), "pooled_prompt_embeds": pooled[0].cpu()}

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict from tokens of 2 x 2 latents. The transformer is fed t itself, float32."""
        batch, _, height, width = x_t.shape
        texts = conditioning["prompt_embeds"]
        told = self._transformer_config["guidance_embeds"]
        time = t.to(torch.float32)
        with exact_time(self.transformer.get_submodule("time_text_embed"), 1000 * time):
            tokens = self.transformer(
                hidden_states=pack(x_t),
                timestep=time,
                guidance=x_t.new_full((batch,), self.embedded_guidance_scale, dtype=torch.float32) if told else None,
                encoder_hidden_states=texts,
                pooled_projections=conditioning["pooled_prompt_embeds"],
                txt_ids=texts.new_zeros(texts.shape[1], 3),
                img_ids=_positions(height // SIDE, width // SIDE, x_t),
                return_dict=False,
            )[0].float()
        return unpack(tokens, height, width)


def _positions(rows: int, columns: int, like: Tensor) -> Tensor:
    """Return ``[rows columns, 3]``: 0, the row and the column of each token."""
    row, column = torch.meshgrid(
        torch.arange(rows, device=like.device), torch.arange(columns, device=like.device), indexing="ij"
    )
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1).to(like.dtype)


def load(path: str, components: tuple[str, ...], device: torch.device) -> Flux:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode."""
    return Flux(path, components, device)
