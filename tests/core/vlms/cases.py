"""Media, questions and settings on which ours and the stock processors are compared. Imports no torch."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

QWEN25, QWEN3 = "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"
QWEN2 = "Qwen2VLForConditionalGeneration"
"""The one that docs/extend/vlm.md adds."""
ARCHITECTURES = (QWEN25, QWEN3)


class Case(NamedTuple):
    """A batch: for each conversation the shapes of its media, and how its videos are sampled."""

    media: list[list[tuple[int, ...]]]
    """``(height, width)`` of images, ``(frames, height, width, frames per second)`` of videos."""
    video: dict[str, Any]


CASES = {
    "text": Case([[]], {}),
    "image": Case([[(20, 30)]], {}),
    "enlarged": Case([[(3, 100)]], {}),
    "exact": Case([[(16, 24)]], {}),
    "video": Case([[(9, 20, 30, 8)]], {"fps": 4.0}),
    "odd": Case([[(7, 30, 17, 24)]], {"do_sample_frames": False}),
    "number": Case([[(13, 16, 16, 30)]], {"num_frames": 6}),
    "capped": Case([[(8, 40, 40, 8)]], {"do_sample_frames": False, "cap_pixels_per_frame": True}),
    "batch": Case([[(20, 30), (6, 20, 30, 4)], [], [(5, 9, 40, 10), (33, 12), (8, 8)]], {"fps": 2.0}),
}


EARLIER_TOKENS = Path(__file__).parent / "golden/tokens-of-transformers-4.57.1.npz"
"""By case the tokens ``[conversations, tokens]`` that Qwen3-VL's stock processor of transformers 4.57.1 made."""
GOLDEN_PATCHES = 16
"""Number of patches of a case that the committed values have."""


def thinned(name: str, values: np.ndarray) -> np.ndarray:
    """Values as they are committed: of patches only some, evenly spaced."""
    if not name.startswith("pixel_values") or len(values) <= GOLDEN_PATCHES:
        return values
    return values[np.arange(GOLDEN_PATCHES) * len(values) // GOLDEN_PATCHES]


def conversation(shapes: list[tuple[int, ...]], index: int) -> list[dict[str, Any]]:
    """Media of these shapes, then a question longer for each index."""
    parts: list[dict[str, Any]] = []
    for shape in shapes:
        if len(shape) == 2:
            parts.append({"type": "image", "image": pixels(1, *shape)[0]})
        else:
            parts.append({"type": "video", "video": pixels(*shape[:3]), "fps": float(shape[3])})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?" + "!" * index}]}]


def pixels(frames: int, height: int, width: int) -> np.ndarray:
    """Waves that move, uint8 ``[frames, height, width, 3]``: whole numbers, equal on every machine."""
    t, y, x, c = np.ogrid[:frames, :height, :width, :3]
    return ((3 * y * y + 11 * x + 5 * x * y + 67 * c + 23 * t * (x + 1)) % 256).astype(np.uint8)
