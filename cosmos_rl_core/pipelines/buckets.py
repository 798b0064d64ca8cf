"""Sizes of about one area and several ratios, so that training cuts little off media of different shapes."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import product
from typing import Any

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import sizes

Size = tuple[int, int]
"""Height and width in pixels."""
_WIDE = (Fraction(4, 3), Fraction(3, 2), Fraction(16, 9))
RATIOS = (Fraction(1), *(ratio for wide in _WIDE for ratio in (wide, 1 / wide)))
"""Widths over heights: 1:1, 4:3, 3:2, 16:9 and their inverses."""


def buckets(pipeline: str, size: Size, frames: int) -> tuple[Size, ...]:
    """Return the buckets of media of ``size`` for a pipeline, one for each ratio that has a size of its own.

    Raises :class:`ConfigError` if the pipeline cannot make one of them.
    """
    sizes.latent_shape(pipeline, size, frames)
    found = of_area(size, sizes.multiples(pipeline))
    for bucket in found:
        try:
            sizes.latent_shape(pipeline, bucket, frames)
        except ConfigError as error:
            raise ConfigError(
                f"crop = 'buckets' makes media of {bucket[0]} x {bucket[1]} of inference_size {list(size)}, which this "
                f"model does not take: {error}; lower inference_size, or set crop to 'centre'"
            ) from error
    return found


def of_area(size: Size, multiples: Size) -> tuple[Size, ...]:
    """Return the sizes nearest to :data:`RATIOS` with at most the area of ``size``, in that order, each once.

    Height and width are the multiples just below or above the exact values. ``size`` itself takes the place of the
    ratio nearest to its own; turned by a quarter, it takes the place of the inverse ratio.
    """
    chosen = {ratio: _nearest_below(size, ratio, multiples) for ratio in RATIOS}
    own = min(RATIOS, key=lambda ratio: _apart(ratio, _ratio(size)))
    turned = size[1], size[0]
    if all(side % multiple == 0 for side, multiple in zip(turned, multiples, strict=True)):
        chosen[1 / own] = turned
    chosen[own] = size
    return tuple(dict.fromkeys(chosen.values()))


@cache
def nearest(buckets: Sequence[Size], size: Size) -> Size:
    """Return the bucket whose ratio is nearest to the ratio of ``size``; the first one if several are as near."""
    return min(buckets, key=lambda bucket: _apart(_ratio(bucket), _ratio(size)))


def _nearest_below(size: Size, ratio: Fraction, multiples: Size) -> Size:
    """Return the size of at most the area of ``size`` that is nearest to ``ratio``; ``size`` if there is none."""
    area = size[0] * size[1]
    # Whole numbers, and so equal on all machines.
    down = math.isqrt(area * ratio.denominator // ratio.numerator) // multiples[0]
    across = math.isqrt(area * ratio.numerator // ratio.denominator) // multiples[1]
    every = product((down, down + 1), (across, across + 1))
    found = [(rows * multiples[0], columns * multiples[1]) for rows, columns in every if rows and columns]
    fitting = [one for one in found if one[0] * one[1] <= area]
    return min(fitting, key=lambda one: (_apart(_ratio(one), ratio), -one[0] * one[1]), default=size)


def _ratio(size: Size) -> Fraction:
    return Fraction(size[1], size[0])


def _apart(one: Fraction, other: Fraction) -> Any:
    """Return the larger ratio divided by the smaller one, an exact fraction, and so equal on all machines."""
    return max(one / other, other / one)
