"""Measure the statistics of pixels on pictures and clips that are in memory: samples a second of a core.

``python -m tests.benchmarks.pictures`` writes what came out into ``results/``.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from cosmos_rl_core.rewards import pixel_statistics
from cosmos_rl_core.rewards._base import Sample
from tests.benchmarks import record

SHAPES = ((1, 512, 512), (1, 1024, 1024), (16, 256, 256))
"""Frames, height and width."""
GROUP = 4


def rate(shape: tuple[int, int, int], samples: int) -> float:
    """Samples a second of a core, scored in groups of one prompt."""
    reward = pixel_statistics.Reward(pixel_statistics.Options())
    dice = np.random.default_rng(0)
    pixels = [dice.integers(0, 256, (*shape, 3), dtype=np.uint8) for _ in range(GROUP)]
    group = [Sample(str(number), "prompt", "", one) for number, one in enumerate(pixels)]
    reward.score(group)
    began_s = time.process_time()
    for _ in range(samples // GROUP):
        reward.score(group)
    return samples // GROUP * GROUP / (time.process_time() - began_s)


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pictures", description=__doc__)
    parser.add_argument("--samples", type=int, default=64, help="samples of a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    asked = parser.parse_args(argv)
    measured, found = record.Measured(asked), {shape: list[float]() for shape in SHAPES}
    for _ in range(asked.repeats):
        for shape, rates in found.items():
            rates.append(rate(shape, asked.samples))
    rows = [{"shape": shape, "samples_per_core_s": statistics.median(rates)} for shape, rates in found.items()]
    measured.write("pictures", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
