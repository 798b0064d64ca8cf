"""Measure what a GPU must show, in parts that go on where the last run ended: ``python -m tests.gpu``.

``--minutes`` bounds the time: no part begins that would not fit, and the same command goes on later. ``--wheels`` is a
folder of wheels (``make gpu-bundle``) that are installed first, into a folder of their own, for an image that has only
torch and the usual libraries. Without a device only what needs none is done: what plans count for each shape.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tests.gpu import lane, wheels

ROOT = Path(__file__).parents[2]
DEFAULT = Path("outputs/gpu/lane.json")
AGAIN, NO_DEVICE = 75, 69
"""Exit codes: parts are left for another run; or none can be done, because there is no device."""
ASK = "import torch; print(int(torch.cuda.is_available()))"


def main(argv: list[str]) -> int:
    """Do the parts; returns 0 once all are done, 1 if one ended badly, and 75 if some are left."""
    began_s, settings = time.monotonic(), _parser().parse_args(argv)
    results = lane.Results(settings.results)
    on_device = settings.tiny or _has_device()
    parts = lane.chosen(results, settings.parts, on_device=on_device)
    if settings.list:
        for part in lane.PARTS:
            print(f"{part.name}: {results.outcome(part) or 'not done'}, about {part.estimate_s:.0f} s")
        return 0
    # This project, which an image does not have installed: processes that stay are started in other folders.
    paths = [ROOT] if settings.wheels is None else [ROOT, wheels.installed(settings.wheels)]
    worker = lane.Worker([sys.executable, "-m", "tests.gpu.worker"], settings.results.with_suffix(".log"), paths)
    seconds = 60 * settings.minutes - (time.monotonic() - began_s)
    left = lane.run(results, parts, worker, seconds, tiny=settings.tiny)
    bad = [part.name for part in lane.PARTS if results.outcome(part) in ("failed", "too long")]
    for part in left:
        print(f"left for another run: {part.name}, about {part.estimate_s:.0f} s")
    if bad:
        print(f"ended badly, and done again by the next run: {', '.join(bad)}", file=sys.stderr)
    if not on_device:
        print("no CUDA device: all other parts need one", file=sys.stderr)
    return 1 if bad else AGAIN if left else 0 if on_device else NO_DEVICE


def _has_device() -> bool:
    # In a process of its own: this one may not have what torch needs, and keeps no context.
    asked = subprocess.run([sys.executable, "-c", ASK], stdout=subprocess.PIPE, text=True, check=True)
    return asked.stdout.strip() == "1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", help="beginnings of names of parts (default: all)")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most; no part begins that would not fit")
    parser.add_argument("--results", type=Path, default=DEFAULT, help="the JSON that parts add up to")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU, to see that it works")
    parser.add_argument("--list", action="store_true", help="only say which parts there are")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
