"""Qwen-Image as a velocity field."""

from diffusers import QwenImagePipeline

from cosmos_rl_core.models._conditioning import Entries
from cosmos_rl_core.models._qwen_image import QwenImageModel


class QwenImage(QwenImageModel):
    """Qwen-Image. Conditioning: ``prompt_embeds``, and ``prompt_embeds_mask`` in batches of unequal lengths."""

    stock_class = QwenImagePipeline

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        embeds, _ = self.pipeline.encode_prompt(prompt, device=self._device, max_sequence_length=max_prompt_length)
        return {"prompt_embeds": embeds[0].cpu()}


load = QwenImage
