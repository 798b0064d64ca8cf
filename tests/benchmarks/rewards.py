"""Measure the reward service against a plain loop: scores a second of a scorer that takes 20 ms or more a sample.

``python -m tests.benchmarks.rewards`` writes what came out into ``results/``. Set ``OMP_NUM_THREADS=1``: the loop has
one thread, as each process of the service.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_core.rewards._base import Sample
from tests import running_service as running
from tests.benchmarks import laborious, record
from tests.running_service import Command
from tests.upstream_client import UpstreamClient, frame

PLUGIN = str(Path(laborious.__file__))
SENDERS = 2
"""Threads of the client that send frames."""
CASES = (("computes", 1), ("computes", 2), ("waits", 1), ("waits", 2))
"""Kinds of scorer, and numbers of their processes."""


def pictures(settings: argparse.Namespace) -> np.ndarray:
    """All samples, uint8 ``[N, size, size, 3]``."""
    shape = (settings.samples, settings.size, settings.size, 3)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def options_of(kind: str, settings: argparse.Namespace, samples: list[Sample]) -> dict[str, Any]:
    """Options with which a sample takes ``sample_s`` in a plain loop."""
    if kind == "waits":
        return {"wait_s": settings.sample_s}
    products = 64
    took_s = min(seconds_of(lambda: plain({"products": products}, samples[:4])) for _ in range(3)) / 4
    return {"products": max(1, round(products * settings.sample_s / took_s))}


def plain(options: dict[str, Any], samples: list[Sample]) -> list[Any]:
    """Scores of a loop in this process."""
    return laborious.Reward(laborious.Options(**options)).score(samples)


def served(client: UpstreamClient, bodies: list[bytes]) -> list[float]:
    """Scores of a service, whose client sends all frames and fetches their results in order."""
    with ThreadPoolExecutor(SENDERS) as pool:
        uuids = pool.map(client.enqueue, bodies)
        return [score for uuid in uuids for score in client.result(uuid, "laborious", 600)["scores"]["laborious"]]


def speed(folder: Path, settings: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Scores a second of loop and service, in turn, and the median of their ratios; the scores have the same bits."""
    array = pictures(settings)
    samples = [Sample(str(i), str(i), "a", picture[None]) for i, picture in enumerate(array)]
    batches = [array[i : i + settings.batch] for i in range(0, len(array), settings.batch)]
    bodies = [frame(["a"] * len(b), {"laborious": 1.0}, b, media_type="image") for b in batches]
    for kind, processes in CASES:
        options, name = options_of(kind, settings, samples), f"{kind}-{processes}"
        scorer = {"reward_type": "laborious", "options": options, "processes": processes}
        (folder / name).mkdir()
        values = running.settings(folder / name, scorer, plugins=[PLUGIN])
        command = Command(running.write(folder / name, values))
        client = command.start()
        running.wait_ready(client)
        expected = [entry["laborious"] for entry in plain(options, samples)]
        assert served(client, bodies) == expected
        loops, services = list[float](), list[float]()
        for _ in range(settings.repeats):
            loops.append(seconds_of(lambda chosen=options: plain(chosen, samples)))
            services.append(seconds_of(lambda asked=client: served(asked, bodies)))
        assert command.terminate() == 0
        yield {
            "scorer": kind,
            "processes": processes,
            "samples": len(samples),
            "sample_s": statistics.median(loops) / len(samples),
            "plain_scores_per_s": len(samples) / statistics.median(loops),
            "scores_per_s": len(samples) / statistics.median(services),
            "ratio": statistics.median(loop / service for loop, service in zip(loops, services, strict=True)),
        }


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the clock that a call takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    settings = _parser().parse_args(argv)
    measured = record.Measured(settings)
    with tempfile.TemporaryDirectory() as folder:
        rows = [*speed(Path(folder), settings)]
    measured.write("rewards", rows)
    for row in rows:
        print(row)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.rewards", description=__doc__)
    parser.add_argument("--samples", type=int, default=256, help="of each measurement")
    parser.add_argument("--batch", type=int, default=8, help="samples of a request")
    parser.add_argument("--size", type=int, default=512, help="of the pictures, in pixels")
    parser.add_argument("--sample-s", type=float, default=0.025, help="seconds a sample takes in the plain loop")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement; the median counts")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
