"""Statistics of pixels, which warn of collapsed or hacked pictures before any judge does.

All sums are of whole numbers, so a picture has the same statistics on every machine. With luma ``Y`` in [0, 1]
(0.299 red + 0.587 green + 0.114 blue) and means over the frames of a video:

- ``luma``: the mean of Y. ``contrast``: its standard deviation.
- ``edge_density``: the share of neighbouring pixels whose Y differs by more than 0.1.
- ``colour_entropy``: bits of the histogram of colours, 8 levels a channel.
- ``fine_energy``: the variance of Y within blocks of 2 x 2 pixels: texture and noise.
- ``grid_energy``: the variance of Y that the position within cells of 8 x 8 pixels explains: artefacts of a decoder,
  such as checkerboards. Absent below 8 x 8 pixels.
- ``block_deviation``: the picture is cut into 8 x 8 equal blocks. This is the largest distance, in any channel, of a
  block's mean colour from the median of all blocks. ``border_deviation``: the same for the 28 blocks at the border
  only, where there is less of the picture's subject. ``block_contrast``: the largest standard deviation of Y within a
  block. These three show a small patch, which all other statistics average away. A video has the largest value of its
  frames. Absent below 8 x 8 pixels.
- ``flicker``: mean |Y(t-1) - 2 Y(t) + Y(t+1)| / 2. It is 0 for a steady change. Absent below three frames.
- ``group_diversity``: mean distance from the other samples of the prompt: the root mean square difference of colours,
  on 32 x 32 thumbnails. Absent if no other sample of the prompt has as many frames.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from PIL import Image
from pydantic import Field

from cosmos_rl_core.config.reward_facts import Facts
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.packages import version
from cosmos_rl_core.rewards._base.pixels import frames_of
from cosmos_rl_core.rewards._batches import each

NAME = "pixel_statistics"
WHITE = 255_000
"""Luma of white: the weights of the channels are thousandths."""
LUMA = np.array([299, 587, 114], np.int32)
EDGE = 0.1
"""Least difference of luma that counts as an edge, exclusive."""
BLOCKS = 8
"""Rows and columns of blocks of a picture."""
LOCAL = ("block_deviation", "border_deviation", "block_contrast")
"""Statistics of single blocks."""
CELL = 8
"""Height and width in pixels of the cells of a grid: a latent pixel of most VAEs."""
THUMBNAIL = (32, 32)
Numbers = dict[str, float]


class Options(RewardOptions):
    """The statistic that is the reward's score."""

    facts = Facts(
        scores={
            NAME: "the statistic that `score` names",
            "luma": "in [0, 1]",
            "contrast": "in [0, 0.5]",
            "edge_density": "in [0, 1]",
            "colour_entropy": "bits, in [0, 9]",
            "fine_energy": "variance of luma, in [0, 0.25]",
            "grid_energy": "variance of luma, in [0, 0.25]; absent below 8 x 8 pixels",
            "block_deviation": "in [0, 1]; absent below 8 x 8 pixels",
            "border_deviation": "in [0, 1]; absent below 8 x 8 pixels",
            "block_contrast": "in [0, 0.5]; absent below 8 x 8 pixels",
            "flicker": "in [0, 1]; absent below three frames",
            "group_diversity": "in [0, 1]; absent for a sample alone",
        },
        source="closed forms, stated in `cosmos_rl_core/rewards/pixel_statistics.py`",
        groupwise=True,
        evidence="real weights",
    )
    name: Literal["pixel_statistics"] = NAME  # pyright: ignore[reportIncompatibleVariableOverride]
    score: Literal["luma", "contrast", "edge_density", "colour_entropy", "fine_energy"] = Field(
        default="contrast", json_schema_extra={"neutral": "contrast"}
    )
    """The statistic that is the score ``pixel_statistics``. All others are recorded too."""


class Reward:
    """Score ``pixel_statistics``, one of the statistics, and all of them under their own names."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.version = f"2, pillow {version('pillow')}"

    def check_prompt(self, prompt: Prompt) -> str | None:
        """Return None: prompts are not read."""
        return None

    def score(self, samples: list[Sample]) -> list[Numbers | Exception]:
        """Return each sample's statistics by name, or the error that says why it has none, in order.

        The samples may be of several prompts. Diversity compares each sample with all others of its prompt among them.
        """
        found = each(samples, _statistics)
        distances = _distances([s for s, one in zip(samples, found, strict=True) if isinstance(one, dict)])
        return [
            one | distances.get(sample.sample_id, {}) | {NAME: one[self._options.score]}
            if isinstance(one, dict)
            else one
            for sample, one in zip(samples, found, strict=True)
        ]


def _statistics(sample: Sample) -> Numbers:
    pixels = frames_of(sample)
    lumas = [frame @ LUMA for frame in pixels]
    frames = [_of_frame(frame, luma) for frame, luma in zip(pixels, lumas, strict=True)]
    # Frames have one size, so they have the same statistics.
    found = {name: math.fsum(one[name] for one in frames) / len(frames) for name in frames[0]}
    # The patch with which a policy raises a reward may be in one frame only.
    found |= {name: max(one[name] for one in frames) for name in LOCAL if name in found}
    if len(lumas) > 2:
        bends = [_total(abs(a - 2 * b + c)) for a, b, c in zip(lumas, lumas[1:], lumas[2:], strict=False)]
        found["flicker"] = sum(bends) / (2 * WHITE * len(bends) * lumas[0].size)
    return found


def _of_frame(frame: np.ndarray, luma: np.ndarray) -> Numbers:
    found = {
        "luma": _total(luma) / (WHITE * luma.size),
        "contrast": math.sqrt(_variance(luma.size, _total(luma), _squares(luma))),
        "edge_density": _edge_density(luma),
        "colour_entropy": _colour_entropy(frame),
        "fine_energy": _within_blocks(luma),
    }
    if min(luma.shape) >= CELL:
        found |= {"grid_energy": _grid_energy(luma)} | _of_blocks(frame, luma)
    return found


def _total(numbers: np.ndarray) -> int:
    return int(numbers.sum(dtype=np.int64))


def _square(numbers: np.ndarray) -> np.ndarray:
    return np.square(numbers, dtype=np.int64)


def _squares(numbers: np.ndarray) -> int:
    """Return the sum of squares, exact for whole numbers whose squares add up to less than 2^63."""
    wide = numbers.astype(np.int64, copy=False).ravel()
    return int(wide @ wide)


def _variance(size: int, total: int, squares: int) -> float:
    """Return the population variance, in units of white, of so many lumas with these sums."""
    return (size * squares - total**2) / (size * WHITE) ** 2


def _edge_density(luma: np.ndarray) -> float:
    """Return the share of horizontal and vertical neighbours that differ by more than :data:`EDGE`."""
    steps = [np.abs(np.diff(luma, axis=axis)) for axis in (0, 1)]
    pairs = sum(step.size for step in steps)
    return sum(int((step > EDGE * WHITE).sum()) for step in steps) / pairs if pairs else 0.0


def _colour_entropy(frame: np.ndarray) -> float:
    coarse = (frame >> 5).astype(np.int32)
    counts = np.bincount((coarse[..., 0] << 6 | coarse[..., 1] << 3 | coarse[..., 2]).ravel())
    shares = [count / (frame.shape[0] * frame.shape[1]) for count in counts.tolist() if count]
    return math.fsum(share * math.log2(1 / share) for share in shares)


def _within_blocks(luma: np.ndarray) -> float:
    """Return the variance within blocks of 2 x 2 pixels. An odd last row or column is left out."""
    even = luma[: luma.shape[0] // 2 * 2, : luma.shape[1] // 2 * 2]
    if even.size == 0:
        return 0.0
    blocks = even[0::2, 0::2] + even[0::2, 1::2] + even[1::2, 0::2] + even[1::2, 1::2]
    return (4 * _squares(even) - _squares(blocks)) / (4 * even.size * WHITE**2)


def _grid_energy(luma: np.ndarray) -> float:
    """Return the variance of the mean luma of each place in a cell. Pixels beyond whole cells are left out."""
    rows, columns = (length // CELL for length in luma.shape)
    cells = luma[: rows * CELL, : columns * CELL].reshape(rows, CELL, columns, CELL)
    # As Python's numbers, because the squares of these sums exceed 2^63.
    places = cells.sum(axis=(0, 2), dtype=np.int64).ravel().tolist()
    spread = len(places) * sum(place**2 for place in places) - sum(places) ** 2
    return spread / (len(places) * rows * columns * WHITE) ** 2


def _of_blocks(frame: np.ndarray, luma: np.ndarray) -> Numbers:
    """Return the statistics of the block that differs most from the others."""
    rows, columns = ([length * k // BLOCKS for k in range(BLOCKS + 1)] for length in luma.shape)

    def sums(numbers: np.ndarray) -> np.ndarray:
        """Sum up whole numbers ``[height, width, ...]`` within each block: ``[8, 8, ...]``."""
        bands = [numbers[start:stop].sum(axis=0, dtype=np.int64) for start, stop in pairwise(rows)]
        return np.add.reduceat(np.stack(bands), columns[:-1], axis=1)

    sizes = np.outer(np.diff(rows), np.diff(columns))
    means = sums(frame) / sizes[..., None]
    apart = np.abs(means - np.median(means, axis=(0, 1))).max(axis=2) / 255
    at_border = apart.copy()
    at_border[1:-1, 1:-1] = 0
    # As Python's numbers, because products of these sums pass 2^63.
    blocks = zip(*(one.ravel().tolist() for one in (sizes, sums(luma), sums(_square(luma)))), strict=True)
    return {
        "block_deviation": float(apart.max()),
        "border_deviation": float(at_border.max()),
        "block_contrast": math.sqrt(max(_variance(*block) for block in blocks)),
    }


def _distances(samples: Sequence[Sample]) -> dict[str, Numbers]:
    """Return ``group_diversity`` by sample id. A sample has it if another one of its prompt has as many frames."""
    groups: dict[tuple[str, int], list[tuple[str, np.ndarray]]] = {}
    for sample in samples:
        small = np.stack(
            [np.asarray(Image.fromarray(f).resize(THUMBNAIL, Image.Resampling.BOX)) for f in sample.pixels]
        )
        group = groups.setdefault((sample.prompt_id, len(small)), [])
        group.append((sample.sample_id, small.astype(np.int32)))
    found: dict[str, Numbers] = {}
    for group in groups.values():
        for sample_id, small in group if len(group) > 1 else []:
            # With itself too: that distance is 0.
            apart = math.fsum(math.sqrt(_squares(small - other) / small.size) for _, other in group)
            found[sample_id] = {"group_diversity": apart / (255 * (len(group) - 1))}
    return found
