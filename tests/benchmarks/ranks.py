"""Measure the stages of an iteration of NFT by the command line on one rank and on two, each with a core of its own.

``python -m tests.benchmarks.ranks`` writes what came out into ``results/``. Both take turns.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks import one_core, record

RANKS = (1, 2)
STAGES = ("rollout", "update")
"""Stages that ranks share. A reward has one process here."""


def turn(folder: Path, samples: int, ranks: int) -> dict[str, float]:
    """Seconds of the second iteration of a warm run: the server of the first one still imports."""
    folder.mkdir()
    overrides = [*one_core.sizes_of(samples), "launch.mode=warm", f"launch.processes={ranks}"]
    place = ("--store", str(folder), "--run-id", "measured", "--iterations", "2")
    words = ["run", one_core.recipe_without_validation(folder), *place, *one_core.sets(overrides)]
    one_core.run_on(os.sched_getaffinity(0), folder / "log.txt", *words)
    found = one_core.iteration(str(folder), "measured", 1)
    return {f"{stage}_s": found[f"{stage}_s"] for stage in STAGES} | {"iteration_s": found["iteration_s"]}


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    settings = _parser().parse_args(argv)
    measured = record.Measured(settings)
    turns: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in RANKS}
    for _ in range(settings.repeats):
        for ranks, found in turns.items():
            with tempfile.TemporaryDirectory() as folder:
                found.append(turn(Path(folder, "run"), settings.samples, ranks))
            print(ranks, {name: round(seconds, 2) for name, seconds in found[-1].items()}, flush=True)
    rows: list[dict[str, Any]] = []
    for ranks, found in turns.items():
        seconds = {name: statistics.median(one[name] for one in found) for name in found[0]}
        rows.append({"ranks": ranks, "samples": settings.samples, **seconds})
    work_s = [sum(row[f"{stage}_s"] for stage in STAGES) for row in rows]
    measured.write("ranks", rows, times_as_fast=work_s[0] / work_s[1])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.ranks", description=__doc__)
    parser.add_argument("--samples", type=int, default=960, help="samples of an iteration")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
