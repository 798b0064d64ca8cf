"""CLIP models of transformers with their inputs, on one device."""

from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel import devices
from cosmos_rl_core.parallel.kept import frozen


class ClipModel:
    """A CLIP model, frozen, in eval mode. Embeddings are float64, the output of the projections, not normalised."""

    def __init__(self, model: Any, tokenizer: Any, processor: Any) -> None:
        """Take model, tokenizer and image processor of transformers."""
        self.model, self._tokenizer, self._processor = model, tokenizer, processor
        self._length: int = model.config.text_config.max_position_embeddings
        self.side: int = model.config.vision_config.image_size
        """Height and width of the pictures that it takes, in pixels."""
        self.logit_scale = float(model.logit_scale.float().exp())

    @torch.no_grad()
    def images(self, frames: list[np.ndarray]) -> np.ndarray:
        """Return the embeddings ``[n, dimensions]`` of uint8 frames ``[height, width, 3]`` of any sizes."""
        pictures = [Image.fromarray(frame) for frame in frames]
        pixels = self._processor(images=pictures, return_tensors="pt")["pixel_values"]
        found = self.model.get_image_features(pixel_values=pixels.to(self.model.device, self.model.dtype))
        return found.pooler_output.double().cpu().numpy()

    @torch.no_grad()
    def texts(self, prompts: list[str]) -> np.ndarray:
        """Return the embeddings ``[n, dimensions]`` of prompts, which are cut at the model's number of positions."""
        # Every text has the full length, and no mask: attention looks back only, so padding after the end has no
        # effect, and the kernels never depend on the other texts.
        settings = {"padding": "max_length", "truncation": True, "max_length": self._length, "return_tensors": "pt"}
        tokens = self._tokenizer(prompts, **settings)["input_ids"].to(self.model.device)
        return self.model.get_text_features(input_ids=tokens).pooler_output.double().cpu().numpy()


def load(model: str, processor: str, dtype: Literal["float32", "bfloat16"]) -> ClipModel:
    """Return the CLIP model in the folder ``model``, with tokenizer and image settings from the folder ``processor``.

    Raises :class:`ArtifactError` if weights are missing, and :class:`ConfigError` if the image settings crop to another
    size than the model takes.
    """
    where = f"the files of the CLIP model {model!r}"
    clip: Any = frozen(transformers.CLIPModel, model, where, devices.current(), dtype=getattr(torch, dtype))
    # The class that computes with PIL even if torchvision is installed.
    images: Any = transformers.CLIPImageProcessorPil.from_pretrained(processor, local_files_only=True)
    size, side = images.crop_size, clip.config.vision_config.image_size
    if (size["height"], size["width"]) != (side, side):
        found = f"{processor!r} makes images of {size['height']} x {size['width']}"
        raise ConfigError(f"{found}, the model {model!r} takes {side} x {side}; name the processor of this model")
    return ClipModel(clip, transformers.CLIPTokenizer.from_pretrained(processor, local_files_only=True), images)
