"""Sizes and patches for vision towers that take any number of patches. Imports no torch."""

import math
from typing import TYPE_CHECKING

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.vlms._settings import ImageSettings

if TYPE_CHECKING:
    from torch import Tensor

MAX_ASPECT_RATIO = 200
"""Largest ratio of the longer side of a medium to its shorter side."""


def smart_size(shape: tuple[int, int, int], step: int, factor: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the height and width, multiples of ``factor``, that are nearest to a shape (frames, height, width).

    If frames x height x width, with frames rounded to a multiple of ``step``, is out of ``bounds``, both sides are
    scaled to be just inside. A side is never less than ``factor``. Raises :class:`.ItemError` if a side is more than
    ``MAX_ASPECT_RATIO`` times the other.
    """
    frames, height, width = shape
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ItemError(f"{height}x{width} pixels, expected at most {MAX_ASPECT_RATIO} times as long as wide")
    least, most = bounds
    pixels = frames * height * width
    rounded = [round(side / factor) * factor for side in (height, width)]
    total = round(frames / step) * step * math.prod(rounded)
    if total > most:
        scale = math.sqrt(pixels / most)
        rounded = [max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)]
    elif total < least:
        scale = math.sqrt(least / pixels)
        rounded = [math.ceil(side * scale / factor) * factor for side in (height, width)]
    return rounded[0], rounded[1]


def patches(pixels: "Tensor", settings: ImageSettings) -> "tuple[Tensor, list[int]]":
    """Cut pixels ``[frames, 3, height, width]`` into patches ``[number, values]``.

    Also return the grid: the numbers of patches in time, down and across. The last frame is repeated until the last
    patch is full. The patches of a token follow each other; the values of a patch are ordered by channel, frame, row,
    column.
    """
    length, side, merge = settings.temporal_patch_size, settings.patch_size, settings.merge_size
    frames, channels, height, width = pixels.shape
    full = [*range(frames), *[frames - 1] * (-frames % length)]
    grid = [len(full) // length, height // side, width // side]
    down, across = (count // merge for count in grid[1:])
    cut = pixels[full].reshape(grid[0], length, channels, down, merge, side, across, merge, side)
    ordered = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return ordered.reshape(math.prod(grid), channels * length * side * side), grid
