"""Measure an iteration of NFT by the command line against a naive resident loop, on one core, at several sizes.

``python -m tests.benchmarks.iteration`` writes what came out into ``results/``. The loops and the commands take turns.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

from tests.benchmarks import one_core, record
from tests.benchmarks.naive_loop import Variant

NAIVE: tuple[str, ...] = get_args(Variant)
OURS = ("warm", "cold")
Turns = dict[str, list[dict[str, Any]]]
"""What each turn took, by what ran: a variant of the naive loop, or a mode of the command."""


class Loop:
    """A naive loop in a process of its own, which waits for its turn."""

    def __init__(self, recipe: str, overrides: Sequence[str], variant: str) -> None:
        module = [sys.executable, "-m", "tests.benchmarks.naive_loop"]
        words = [*module, recipe, "--variant", variant, *one_core.sets(overrides)]
        self.process = one_core.start(words, subprocess.PIPE)
        self.variant = variant
        assert self._answer() == {"ready": True}

    def turn(self) -> dict[str, Any]:
        """One iteration."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the naive loop {self.variant} ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def our_turns(folder: Path, recipe: str, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """An iteration of a new run in each mode. The first one of a warm command is not told: its server still imports."""
    place = ("--store", str(folder), "--run-id", "measured")
    found: dict[str, dict[str, Any]] = {}
    for mode, k in (("warm", 1), ("cold", 2)):
        words = ["run", recipe, *place, "--iterations", str(k + 1), *one_core.sets([*overrides, f"launch.mode={mode}"])]
        ended = one_core.run(folder.with_suffix(".txt"), *words)
        found[mode] = one_core.iteration(str(folder), "measured", k) | {"peak_bytes": ended.peaks}
    return found


def measure(folder: Path, samples: int, repeats: int) -> Turns:
    """All turns at one size."""
    recipe, overrides = one_core.recipe_without_validation(folder), one_core.sizes_of(samples)
    found: Turns = defaultdict(list)
    with ExitStack() as at_the_end:
        loops: list[Loop] = []
        for variant in NAIVE:
            loops.append(Loop(recipe, overrides, variant))
            at_the_end.callback(loops[-1].close)
        for repeat in range(repeats):
            for loop in loops:
                found[loop.variant].append(loop.turn())
            for mode, turn in our_turns(folder / f"{samples}-{repeat}", recipe, overrides).items():
                found[mode].append(turn)
            print(
                samples, repeat, {how: round(turns[-1]["iteration_s"], 2) for how, turns in found.items()}, flush=True
            )
    return found


def rows_of(samples: int, turns: Turns) -> list[dict[str, Any]]:
    """Medians and ranges; ``ratio`` is to the naive loop of three forward passes."""
    rows: list[dict[str, Any]] = []
    for how, some in turns.items():
        seconds = {name: [turn[name] for turn in some] for name in some[0] if name.endswith("_s")}
        row: dict[str, Any] = {"samples": samples, "how": how, "trained": [turn["samples"] for turn in some]}
        row |= {name: statistics.median(each) for name, each in seconds.items()}
        row["ranges_s"] = {name: [min(each), max(each)] for name, each in seconds.items()}
        row["peak_bytes"] = some[-1]["peak_bytes"]
        row |= {name: some[-1][name] for name in ("store_bytes", "reward") if name in some[-1]}
        rows.append(row)
    naive_s = next(row["iteration_s"] for row in rows if row["how"] == NAIVE[0])
    return [row | {"ratio": row["iteration_s"] / naive_s} for row in rows]


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    settings = _parser().parse_args(argv)
    measured, smallest = record.Measured(settings), min(settings.samples)
    rows: list[dict[str, Any]] = []
    for samples in settings.samples:
        with tempfile.TemporaryDirectory() as folder:
            turns = measure(Path(folder), samples, max(1, settings.repeats * smallest // samples))
        rows += rows_of(samples, turns)
    measured.write("iteration", rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.iteration", description=__doc__)
    sizes = "samples of an iteration; 9600 takes an hour"
    parser.add_argument("--samples", type=int, nargs="+", default=[96, 960], help=sizes)
    parser.add_argument("--repeats", type=int, default=5, help="turns at the smallest size; larger ones take as long")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
