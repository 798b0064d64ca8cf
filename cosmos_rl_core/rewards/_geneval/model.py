"""Objects in pictures by Mask2Former of transformers."""

from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.models.mask2former.modeling_mask2former import Mask2FormerModel, Mask2FormerPreTrainedModel

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel import devices
from cosmos_rl_core.parallel.kept import frozen
from cosmos_rl_core.rewards._geneval.rule import CLASSES, THRESHOLD, Detection

MAX_DETECTIONS = 100
"""Largest number of pairs of query and class that are examined, the surest first."""


class Segmenter(Mask2FormerPreTrainedModel):
    """Mask2Former with its classification head; tensors have the names of ``Mask2FormerForUniversalSegmentation``.

    That class itself is not used, because it also makes the training loss, which needs scipy.
    """

    def __init__(self, config: transformers.Mask2FormerConfig) -> None:
        super().__init__(config)
        self.model = Mask2FormerModel(config)
        self.class_predictor = nn.Linear(config.hidden_dim, len(config.id2label or {}) + 1)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of classes ``[n, queries, classes + 1]`` and of masks ``[n, queries, height, width]``."""
        found = self.model(pixel_values=pixel_values, output_hidden_states=True)
        states = found.transformer_decoder_intermediate_states[-1].transpose(0, 1)
        return self.class_predictor(states), found.masks_queries_logits[-1]


class Detector:
    """A segmenter with its image processor, frozen, in eval mode."""

    def __init__(self, model: Any, processor: Any) -> None:
        """Take a model and the image processor of transformers."""
        self.model, self._processor = model, processor

    @torch.no_grad()
    def detections(self, frames: list[np.ndarray]) -> list[list[Detection]]:
        """Return the objects in each uint8 frame ``[height, width, 3]``; the frames have one size."""
        pixels, mask, classes, masks = self._seen(frames)
        used = int(mask.any(dim=1).sum()), int(mask.any(dim=0).sum())
        shape = frames[0].shape[0], frames[0].shape[1]
        return [
            objects_in(one, resized(some, (pixels.shape[-2], pixels.shape[-1]), used, shape))
            for one, some in zip(classes.float(), masks.float(), strict=True)
        ]

    @torch.no_grad()
    def logits(self, frames: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the float32 logits from which objects are read, for each of several frames of one size.

        They are of classes, ``[queries, classes + 1]``, and of masks, ``[queries, height, width]``.
        """
        _, _, classes, masks = self._seen(frames)
        return [*zip(classes.float().cpu().numpy(), masks.float().cpu().numpy(), strict=True)]

    def _seen(self, frames: list[np.ndarray]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the padded inputs, the mask of an input's pixels without padding, and logits of classes and masks."""
        inputs = self._processor(images=frames, return_tensors="pt")
        pixels = inputs["pixel_values"]
        return pixels, inputs["pixel_mask"][0], *self.model(pixels.to(self.model.device, self.model.dtype))


def resized(masks: Tensor, padded: tuple[int, int], used: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Return logits of masks ``[queries, *shape]``, at the size of the frame.

    They are scaled to the padded input, cut to its used part, and scaled to the frame.
    """
    settings: dict[str, Any] = {"mode": "bilinear", "align_corners": False}
    whole = nn.functional.interpolate(masks[None], size=padded, **settings)
    return nn.functional.interpolate(whole[..., : used[0], : used[1]], size=shape, **settings)[0]


def objects_in(classes: Tensor, masks: Tensor) -> list[Detection]:
    """Return the objects in a frame, read off logits ``[queries, classes + 1]`` and ``[queries, height, width]``.

    A confidence is the probability of the class, times the mean probability of the mask inside the mask.
    """
    scores = classes.softmax(dim=-1)[:, :-1]
    best, places = scores.flatten().topk(min(MAX_DETECTIONS, scores.numel()))
    found: list[Detection] = []
    for score, place in zip(best.tolist(), places.tolist(), strict=True):
        query, kind = divmod(place, scores.shape[1])
        mask = masks[query] > 0
        # The mask's factor is at most 1, so a score below the threshold stays below it.
        if score <= THRESHOLD or not mask.any():
            continue
        sure = score * float(masks[query].sigmoid()[mask].mean())
        rows, columns = mask.any(dim=1).nonzero()[:, 0], mask.any(dim=0).nonzero()[:, 0]
        box = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
        found.append(Detection(CLASSES[kind], sure, box, mask.cpu().numpy()))
    return found


def load(folder: str, dtype: Literal["float32", "bfloat16"]) -> Detector:
    """Return the detector in a folder.

    Raises :class:`ArtifactError` if weights are missing, and :class:`ConfigError` for classes other than COCO's.
    """
    where = f"the files of the detector {folder!r}"
    model: Any = frozen(Segmenter, folder, where, devices.current(), dtype=getattr(torch, dtype))
    if (known := len(model.config.id2label)) != len(CLASSES):
        found = f"the detector {folder!r} knows {known} classes"
        raise ConfigError(f"{found}, expected COCO's {len(CLASSES)} of a Mask2Former for instances")
    processor = transformers.Mask2FormerImageProcessorPil.from_pretrained(folder, local_files_only=True)
    return Detector(model, processor)
