"""Qwen-Image-Edit Plus as a velocity field."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import QwenImageEditPlusPipeline
from PIL import Image
from torch import nn
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._conditioning import Entries
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.models._packing import pack
from cosmos_rl_core.models._pictures import scaled
from cosmos_rl_core.models._qwen_image import QwenImageModel
from cosmos_rl_core.models.qwen_image_edit import text_size, vae_size
from cosmos_rl_core.pipelines.spec import REFERENCE_TOKENS


class QwenImageEdit(QwenImageModel):
    """Qwen-Image-Edit Plus. Conditioning: ``prompt_embeds`` of text and pictures, ``prompt_embeds_mask`` in batches of
    unequal lengths, and ``reference_tokens``.
    """

    stock_class = QwenImageEditPlusPipeline

    def _load_pipeline(self, components: tuple[str, ...]) -> QwenImageEditPlusPipeline:
        return _load_pipeline(self._path, components, self._device)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        return self._encode_prompt_with(prompt, (), max_prompt_length)

    def _encode_prompt_with(self, prompt: str, references: Sequence[np.ndarray], max_prompt_length: int) -> Entries:
        """Return embeddings of the tokens of pictures and text.

        Raises :class:`ConfigError` for more tokens than ``max_prompt_length``: the stock pipeline cuts nothing off.
        """
        pictures = [Image.fromarray(scaled(one[0], text_size(one.shape[1:3]))) for one in references]
        embeds, _ = self.pipeline.encode_prompt(prompt, image=pictures or None, device=self._device)
        if (found := embeds.shape[1]) > max_prompt_length:
            raise ConfigError(
                f"the prompt {prompt[:60]!r} has {found} tokens with its {len(references)} references, "
                f"max_prompt_length = {max_prompt_length}: this model cuts nothing off; raise it, or shorten the prompt"
            )
        return {"prompt_embeds": embeds[0].cpu()}

    def _encode_references(self, references: Sequence[np.ndarray], size: tuple[int, int], frames: int) -> Entries:
        """Encode each picture at about 1024 x 1024 pixels of its own aspect ratio."""
        encoded = [
            self.encode_media(torch.from_numpy(scaled(one[0], vae_size(one.shape[1:3])))[None, None])
            for one in references
        ]
        return {REFERENCE_TOKENS: torch.cat([pack(latents)[0] for latents in encoded]).cpu()}


def load_stock(
    path: str, guardrail: bool, device: torch.device, transformer: nn.Module | None = None
) -> QwenImageEditPlusPipeline:
    """Return the whole stock pipeline, float32, read straight to ``device``, with our processor of pictures.

    There is no guardrail. ``transformer``, if given, replaces the directory's own.
    """
    own = "transformer" if transformer is None else EMPTY_TRANSFORMER
    pipeline = _load_pipeline(path, (own, "vae", "text"), device)
    if transformer is not None:
        pipeline.register_modules(transformer=transformer)
    return pipeline


class _PictureProcessor(Qwen2VLProcessor):
    """Processor of texts and pictures without videos, which need torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def _load_pipeline(path: str, components: tuple[str, ...], device: torch.device) -> Any:
    """Return the stock pipeline with these ``components`` (and the scheduler) loaded and every other one None.

    Its processor scales pictures with Pillow even if torchvision is installed, so that all machines get the same bits.
    """
    processor = _read_processor(path) if "text" in components else None
    return _loading.load_pipeline(QwenImageEditPlusPipeline, path, components, device, processor=processor)


def _read_processor(path: str) -> _PictureProcessor:
    read = {"subfolder": "processor", "local_files_only": True}
    pictures = Qwen2VLImageProcessorPil.from_pretrained(path, **read)
    return _PictureProcessor(pictures, AutoTokenizer.from_pretrained(path, **read))


load = QwenImageEdit
