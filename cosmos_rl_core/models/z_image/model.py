"""Z-Image as a velocity field."""

import torch
from diffusers import ZImagePipeline
from torch import Tensor

from cosmos_rl_core.models._conditioning import Conditioning, Entries
from cosmos_rl_core.models._media import ImageModel


class ZImage(ImageModel):
    """Z-Image. Conditioning: ``prompt_embeds``, one for each token of the text, and in batches of unequal lengths
    ``prompt_embeds_mask``.
    """

    stock_class = ZImagePipeline
    cfg_normalization: float = 0.0
    """Largest norm of a guided prediction, as a multiple of the conditional prediction's norm; 0 sets no limit."""
    cfg_truncation: float = 1.0
    """Largest ``1 - t`` at which predictions are guided."""

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        """Encode one prompt, in a list that the stock pipeline may change."""
        (embeds,), _ = self.pipeline.encode_prompt(
            [prompt], device=self._device, do_classifier_free_guidance=False, max_sequence_length=max_prompt_length
        )
        return {"prompt_embeds": embeds.cpu()}

    def _stock_sigmas(self, num_steps: int) -> list[float]:
        """Return levels that torch spaces evenly, in float32."""
        return torch.linspace(1.0, 1 / num_steps, num_steps, device="cpu").tolist()

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Predict the velocity: minus the transformer's output. It gets ``1 - t``, and lists of images and texts."""
        texts = list(conditioning["prompt_embeds"].unbind())
        if (mask := conditioning.get("prompt_embeds_mask")) is not None:
            texts = [text[:length] for text, length in zip(texts, mask.sum(1).tolist(), strict=True)]
        images = self.transformer(list(x_t.unsqueeze(2).unbind()), _time(t), texts, return_dict=False)[0]
        return -torch.stack(images).squeeze(2).float()

    def unguided(self, t: Tensor) -> Tensor | None:
        """Return a mask ``[B]``: True where ``1 - t`` is above ``cfg_truncation``; None if that is above 1."""
        return None if self.cfg_truncation > 1 else _time(t).double() > self.cfg_truncation

    def guide(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Combine both predictions; a sample's norm is at most ``cfg_normalization`` times its conditional norm."""
        guided = conditional + (guidance_scale - 1) * (conditional - unconditional)
        if self.cfg_normalization == 0:
            return guided
        own, found = (v.flatten(1).norm(dim=1).view(-1, 1, 1, 1) for v in (conditional, guided))
        most = own * self.cfg_normalization
        return torch.where(found > most, guided * (most / found), guided)


def _time(t: Tensor) -> Tensor:
    """Return ``1 - t`` in float32, rounded as in the stock pipeline."""
    return (1000 - 1000 * t.to(torch.float32)) / 1000


load = ZImage
