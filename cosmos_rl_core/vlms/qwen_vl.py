"""Qwen2.5-VL and Qwen3-VL, models with their classes, such as Cosmos-Reason1 and Cosmos-Reason2, and VideoReward.

Sizes, sampling and texts are the same as in the processors of transformers 5.23, which need torchvision. With
``clip_markers = false`` Qwen3-VL gets the tokens of transformers 4.57.1, which cosmos-rl uses.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.vlms import _qwen_shapes
from cosmos_rl_core.vlms._base import Changes, Clip, Kind, Visual, WeightShapes
from cosmos_rl_core.vlms._patches import patches, smart_size
from cosmos_rl_core.vlms._settings import STEPS, read_settings

if TYPE_CHECKING:
    from torch import Tensor

_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_HALF = (0.5, 0.5, 0.5)
_PIXELS = {**STEPS, "temporal_patch_size": 2, "merge_size": 2}
_FRAMES = {"min_frames": 4, "max_frames": 768, "num_frames": None, "cap_pixels_per_frame": False}
_AREA = {"min_pixels": None, "max_pixels": None}
_IMAGE = {
    **_PIXELS,
    **_AREA,
    "size": {"shortest_edge": 56**2, "longest_edge": 1280 * 28**2},
    "patch_size": 14,
    "image_mean": _CLIP_MEAN,
    "image_std": _CLIP_STD,
}
"""Defaults for images, in both generations."""


class Qwen25VL:
    """Processor of Qwen2.5-VL. The model counts time by ``second_per_grid_ts``."""

    placeholders: Mapping[Kind, str] = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    modules: Mapping[str, tuple[str, ...]] = {
        "projector": ("model.visual.merger.", "model.visual.deepstack_merger_list."),
        "vision": ("model.visual.",),
    }
    packs = True
    weights: WeightShapes | None = WeightShapes(
        _qwen_shapes.qwen25, _qwen_shapes.TABLES, _qwen_shapes.OUTPUT, _qwen_shapes.BLOCK
    )
    video_defaults: Mapping[str, Any] = {
        **_IMAGE,
        **_FRAMES,
        "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
        "do_sample_frames": False,
        "fps": None,
        "max_video_tokens": 128_000,
    }
    patch_size = 14
    """Side of a patch in pixels if the model's settings have none."""

    def __init__(self, path: str, changes: Changes) -> None:
        """Read the settings of the folder ``path``. Raises one :class:`ConfigError` with every mistake in them."""
        vision = {
            "patch_size": ("patch_size", self.patch_size),
            "temporal_patch_size": ("temporal_patch_size", 2),
            "merge_size": ("spatial_merge_size", 2),
        }
        images, videos = read_settings(path, changes, image=_IMAGE, video=self.video_defaults, vision=vision)
        self.image = images
        self.video = videos

    def sample(self, total: int, fps: float) -> list[int]:
        """Return the frames to take from a video of ``total`` frames: evenly spaced, from the first.

        Raises :class:`ItemError` if it is too short. Transformers takes the same frames, except where it fails, because
        rounding makes it take a frame after the last one.
        """
        settings, step = self.video, self.video.temporal_patch_size
        if settings.do_sample_frames and settings.num_frames is not None:
            count = round(settings.num_frames / step) * step
        elif settings.do_sample_frames and settings.fps is not None:
            wanted = max(total / fps * settings.fps, settings.min_frames)
            count = math.floor(min(wanted, settings.max_frames, total) / step) * step
        else:
            count = total
        if not 0 < count <= total:
            raise ItemError(f"{total} frames, expected at least {max(count, step)}")
        return [number * total // count for number in range(count)]

    def size(self, kind: Kind, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels to scale a medium to.

        Raises :class:`ItemError` like :func:`cosmos_rl_core.vlms._patches.smart_size`.
        """
        settings = self.image if kind == "image" else self.video
        least, most = settings.size.shortest_edge, settings.size.longest_edge
        if kind == "video" and self.video.cap_pixels_per_frame:
            share = int(self.video.max_video_tokens * settings.factor**2 * 0.9) * settings.temporal_patch_size // frames
            most = max(min(most, share), int(least * 1.05))
        return smart_size((1, height, width), 1, settings.factor, (least, most))

    def visual(self, kind: Kind, pixels: "Tensor", clip: Clip) -> Visual:
        """Return patches, their grid and text, from normalised pixels ``[frames, 3, height, width]``."""
        settings = self.image if kind == "image" else self.video
        values, grid = patches(pixels, settings)
        tokens = math.prod(grid) // settings.merge_size**2
        if kind == "image":
            text = self.placeholders["image"] * tokens
            return Visual(text, {"pixel_values": values, "image_grid_thw": [grid]})
        inputs = {"pixel_values_videos": values, "video_grid_thw": [grid], **self.time(clip)}
        return Visual(self.text(clip, grid[0], tokens), inputs)

    def text(self, clip: Clip, steps: int, tokens: int) -> str:
        """Return the text that replaces a clip's placeholder: ``tokens`` tokens in ``steps`` steps in time."""
        return self.placeholders["video"] * tokens

    def time(self, clip: Clip) -> dict[str, list[float]]:
        """Return the model's inputs about the times of the frames."""
        return {"second_per_grid_ts": [self.video.temporal_patch_size / clip.sampled_fps]}


class Qwen3VL(Qwen25VL):
    """Processor of Qwen3-VL. The times of the frames are text between them."""

    markers = ("<|vision_start|>", "<|vision_end|>")
    """Tokens around an image and around each step in time of a clip."""
    weights = WeightShapes(_qwen_shapes.qwen3, _qwen_shapes.TABLES, _qwen_shapes.OUTPUT, _qwen_shapes.BLOCK)
    video_defaults: Mapping[str, Any] = {
        **_PIXELS,
        **_FRAMES,
        "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
        "patch_size": 16,
        "image_mean": _HALF,
        "image_std": _HALF,
        "do_sample_frames": True,
        "fps": 2.0,
        "max_video_tokens": 768,
        "clip_markers": True,
    }
    patch_size = 16

    def sample(self, total: int, fps: float) -> list[int]:
        """Return the frames to take from a video of ``total`` frames: evenly spaced, from the first to the last.

        A video with fewer than ``num_frames`` gives some of them twice. Raises :class:`ItemError` if it is too short.
        """
        settings = self.video
        if total < settings.temporal_patch_size:
            raise ItemError(f"{total} frames, expected at least {settings.temporal_patch_size}")
        if not settings.do_sample_frames:
            return list(range(total))
        if settings.num_frames is not None:
            count = settings.num_frames
        elif settings.fps is not None:
            wanted = max(int(total / fps * settings.fps), settings.min_frames)
            count = min(wanted, settings.max_frames, total)
        else:
            count = min(max(total, settings.min_frames), settings.max_frames)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()

    def size(self, kind: Kind, frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the height and width in pixels to scale a medium to. The bounds apply to all frames together.

        Raises :class:`ItemError` like :meth:`Qwen25VL.size`, and on fewer frames than a patch has.
        """
        if kind == "image":
            return super().size(kind, frames, height, width)
        settings = self.video
        if frames < settings.temporal_patch_size:
            raise ItemError(f"{frames} frames, expected at least {settings.temporal_patch_size}")
        least, most = settings.size.shortest_edge, settings.size.longest_edge
        if settings.cap_pixels_per_frame:
            cap = min(settings.max_video_tokens * settings.factor**2, most // frames)
            most = frames * max(cap, int(least * 1.05))
        if height < settings.factor or width < settings.factor:
            scale = max(settings.factor / height, settings.factor / width)
            height, width = int(height * scale), int(width * scale)
        return smart_size((frames, height, width), settings.temporal_patch_size, settings.factor, (least, most))

    def visual(self, kind: Kind, pixels: "Tensor", clip: Clip) -> Visual:
        """Return patches, their grid and text.

        The template writes markers around a clip. Without ``clip_markers``, they are the opening marker of its first
        step in time and the closing marker of its last.
        """
        made = super().visual(kind, pixels, clip)
        if kind == "image" or self.video.clip_markers:
            return made
        opener, closer = self.markers
        before, _, text = made.text.removesuffix(closer).partition(opener)
        return made._replace(text=text, before=before)

    def text(self, clip: Clip, steps: int, tokens: int) -> str:
        """Return for each step in time its seconds, the mean of its first and last frame, then its tokens."""
        times, length = [number / clip.fps for number in clip.indices], self.video.temporal_patch_size
        times += [times[-1]] * (-len(times) % length)
        opener, closer = self.markers
        frame = f"{opener}{self.placeholders['video'] * (tokens // steps)}{closer}"
        starts = range(0, len(times), length)
        return "".join(f"<{(times[start] + times[start + length - 1]) / 2:.1f} seconds>{frame}" for start in starts)

    def time(self, clip: Clip) -> dict[str, list[float]]:
        """Return no inputs: the text has the times."""
        return {}


class Qwen2VLReward(Qwen25VL):
    """Processor of reward models that were made of Qwen2-VL, which does not count time."""

    weights = None
    writes_texts = False
    """Whether transformers has a class that writes texts with the model. The reward plugin loads the model itself."""

    def time(self, clip: Clip) -> dict[str, list[float]]:
        """Return no inputs: the model does not count time."""
        return {}


PROCESSORS = {
    "Qwen2VLRewardModelBT": Qwen2VLReward,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
    "Qwen3VLForConditionalGeneration": Qwen3VL,
}
"""Processor by the class of transformers that a model's folder names."""
