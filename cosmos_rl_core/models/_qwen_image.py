"""The parts that pipelines of Qwen-Image share: its VAE, the transformer's call and its guidance."""

import torch
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models._media import VideoModel
from cosmos_rl_core.models._packing import SIDE, exact_time, pack, unpack
from cosmos_rl_core.pipelines.spec import REFERENCE_TOKENS


class QwenImageModel(VideoModel):
    """A model of Qwen-Image's family. Its VAE encodes videos; an image is one frame.

    Conditioning: ``prompt_embeds``, one for each token of the text, and ``prompt_embeds_mask`` in batches of unequal
    lengths; ``reference_tokens`` where there are references.
    """

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
        """Predict the velocity: the transformer reads tokens of 2 x 2 latents, then tokens of references.

        It gets t itself in float32. If it takes a time of their own for references (``zero_cond_t``), that is 0.
        """
        batch, _, height, width = x_t.shape
        time, tokens = t.to(torch.float32), pack(x_t)
        image_tokens, shapes = tokens.shape[1], [(1, height // SIDE, width // SIDE)]
        if REFERENCE_TOKENS in conditioning:
            tokens = torch.cat([tokens, conditioning[REFERENCE_TOKENS]], dim=1)
            shapes += conditioning.shapes
        times = torch.cat([time, 0 * time]) if self._transformer_config.get("zero_cond_t") else time
        with exact_time(self.transformer.get_submodule("time_text_embed"), times):
            predicted = self.transformer(
                hidden_states=tokens,
                timestep=time,
                encoder_hidden_states=conditioning["prompt_embeds"],
                encoder_hidden_states_mask=conditioning.get("prompt_embeds_mask"),
                img_shapes=[shapes] * batch,
                return_dict=False,
            )[0].float()
        return unpack(predicted[:, :image_tokens], height, width)

    def guide(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Combine both predictions, then scale each token to the norm of its conditional prediction."""
        combined = pack(super().guide(conditional, unconditional, guidance_scale))
        norm = pack(conditional).norm(dim=-1, keepdim=True)
        return unpack(combined * (norm / combined.norm(dim=-1, keepdim=True)), *conditional.shape[2:])
