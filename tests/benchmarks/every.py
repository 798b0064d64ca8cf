"""Run all benchmarks of this folder one after the other, or some: ``make bench``, ``make bench BENCH=iteration``.

Each writes what came out into ``results/``, of which ``python -m docs.figures`` writes the tables of the pages. The
GPU lane (``tests/gpu``) needs a CUDA device, and is left out without one.
"""

import argparse
import os
import subprocess
import sys
import time
from importlib import import_module

import torch

from tests.benchmarks import record
from tests.benchmarks.one_core import ONE_THREAD

GPU = "gpu"
BENCHMARKS: dict[str, list[str]] = {
    "iteration": [],
    "empty_stages": [],
    "long_runs": [],
    "ranks": [],
    "overlap": ["--iterations", "3", "--repeats", "2"],
    "rewards": [],
    "pictures": [],
    "vlm": [],
    "data": [],
    GPU: ["--minutes", "60", "--results", str(record.FOLDER / "gpu-lane.json")],
}
"""Modules, with the arguments whose results the pages show."""


def module_of(name: str) -> str:
    """The module that is run."""
    return "tests.gpu.__main__" if name == GPU else f"tests.benchmarks.{name}"


def said_of(name: str) -> str:
    """What it measures, in a line."""
    return (import_module(module_of(name)).__doc__ or "").splitlines()[0]


def main(argv: list[str]) -> int:
    """Run them; returns 1 if one failed, after all others."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.every", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--list", action="store_true", help="only say what each measures")
    asked = parser.parse_args(argv)
    if unknown := sorted({*asked.names} - {*BENCHMARKS}):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    failed: list[str] = []
    for name in asked.names or BENCHMARKS:
        print(f"{name}: {said_of(name)}", flush=True)
        if asked.list:
            continue
        if name == GPU and not torch.cuda.is_available():
            print("left out: there is no CUDA device", flush=True)
            continue
        began_s = time.monotonic()
        words = [sys.executable, "-m", module_of(name), *BENCHMARKS[name]]
        ended = subprocess.run(words, env=os.environ | ({} if name == GPU else ONE_THREAD), check=False)
        print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
        failed += [name] if ended.returncode else []
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
