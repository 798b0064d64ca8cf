"""DINOv2 models of transformers with their inputs, on one device."""

from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel import devices
from cosmos_rl_core.parallel.kept import frozen


class DinoModel:
    """A DINOv2 model, frozen, in eval mode. Embeddings are float64, the output of the last norm, not normalised."""

    def __init__(self, model: Any, processor: Any) -> None:
        """Take model and image processor of transformers."""
        self._model, self._processor = model, processor

    @torch.no_grad()
    def images(self, frames: list[np.ndarray]) -> np.ndarray:
        """Return the embeddings ``[n, dimensions]`` of uint8 frames ``[height, width, 3]`` of any sizes.

        The embedding of a frame is its token CLS.
        """
        pictures = [Image.fromarray(frame) for frame in frames]
        pixels = self._processor(images=pictures, return_tensors="pt")["pixel_values"]
        found = self._model(pixel_values=pixels.to(self._model.device, self._model.dtype))
        return found.last_hidden_state[:, 0].double().cpu().numpy()


def load(folder: str, dtype: Literal["float32", "bfloat16"]) -> DinoModel:
    """Return the DINOv2 model in a folder, with its image settings.

    Raises :class:`ArtifactError` if weights are missing, and :class:`ConfigError` if it makes images of several sizes.
    """
    where = f"the files of the DINOv2 model {folder!r}"
    model: Any = frozen(transformers.Dinov2Model, folder, where, devices.current(), dtype=getattr(torch, dtype))
    # The class that computes with PIL even if torchvision is installed.
    images: Any = transformers.BitImageProcessorPil.from_pretrained(folder, local_files_only=True)
    if not (images.do_resize and images.do_center_crop):
        found = f"{folder!r} makes images of several sizes: its preprocessor_config.json does not scale and crop"
        raise ConfigError(f"{found}; set do_resize and do_center_crop there")
    return DinoModel(model, images)
