"""Measure the preparation of data against plain loops, its memory, and training on it from a slow store.

``python -m tests.benchmarks.data`` writes what came out into ``results/``, or a part of it by its name.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_rl_core.storage import store
from flows.planning import requests
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from tests.benchmarks import record
from tests.benchmarks.prepared import TINY, USUAL, Dataset, Loops, Seconds, again, run, seconds_of

FEW = 8
"""Items of the runs whose time is start-up."""
MEASURED = (("embed", "local", TINY), ("encode", "local", TINY), ("index", "web", TINY), ("index", "web", USUAL))
"""Stages whose speed is measured, with the kind of the dataset and the size of its pictures."""
LATENCY_S = 0.03
"""Seconds that each read of the slow store takes longer."""


Row = dict[str, Any]


def speed(folder: Path, settings: argparse.Namespace) -> Iterator[Row]:
    """Items a second of each stage and of a plain loop, without start-up: medians over repeats side by side.

    What one item costs is the time of many items less the time of a few, over the difference in number. Seconds of a
    core are measured too, which others on the machine change less than the clock's.
    """
    numbers = count()
    for stage, source, size in MEASURED:
        place = folder / f"{stage}-{size[0]}"
        sets = [Dataset(place / str(number), number, source, size) for number in (FEW, settings.items)]
        ours = [_again(dataset, stage, numbers) for dataset in sets]
        plain = [getattr(Loops(dataset), stage) for dataset in sets]
        for work in (ours[0], plain[0]):
            work()  # for what is only done the first time
        found: list[list[list[Seconds]]] = []
        for _ in range(settings.repeats):
            found.append([[seconds_of(work) for work in pair] for pair in (ours, plain)])
        row: Row = {"stage": stage, "source": source, "size": size, "items": settings.items}
        for name in Seconds._fields:
            # A row a repeat: seconds an item of the stage and of the loop.
            costs = [
                [(getattr(many, name) - getattr(few, name)) / (settings.items - FEW) for few, many in pairs]
                for pairs in found
            ]
            row[name] = {
                "items_per_s": 1 / statistics.median(ours_s for ours_s, _ in costs),
                "plain_items_per_s": 1 / statistics.median(plain_s for _, plain_s in costs),
                "ratio": statistics.median(plain_s / ours_s for ours_s, plain_s in costs),
            }
        yield row


def _again(dataset: Dataset, stage: str, numbers: Iterable[int]) -> Callable[[], object]:
    request, numbers = _request(dataset, stage), iter(numbers)
    return lambda: run(again(request, next(numbers)), dataset.folder)


def _request(dataset: Dataset, stage: str) -> Request:
    return dataset.index if stage == "index" else dataset.prepared[stage]


def memory(folder: Path, settings: argparse.Namespace) -> Iterator[Row]:
    """Most resident memory of each stage as a process of its own, at several sizes of the dataset."""
    peaks: dict[str, list[int]] = {"index": [], "embed": [], "encode": []}
    for number in settings.sizes:
        dataset = Dataset(folder / f"memory-{number}", number)
        for stage, found in peaks.items():
            path = folder / f"memory-{number}" / stage / "request.json"
            path.parent.mkdir()
            path.write_text(again(_request(dataset, stage), 0).model_dump_json(), encoding="utf-8")
            command = [sys.executable, "-m", "tests.benchmarks.peak", str(path)]
            output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            found.append(int(output.splitlines()[-1]))
    for stage, found in peaks.items():
        yield {"stage": stage, "items": settings.sizes, "peak_bytes": found}


def unchanged(folder: Path, settings: argparse.Namespace) -> Iterator[Row]:
    """Seconds of the clock and of a core of the whole command ``cosmos-flows preprocess`` when no file has changed."""
    dataset = Dataset(folder / "unchanged", max(settings.sizes))
    assert dataset.index.stage == "index"
    toml = folder / "drawn.toml"
    toml.write_text(
        f'name = "drawn"\n[sources.here]\nname = "local"\nlocal_dir = "{dataset.media}"\n', encoding="utf-8"
    )
    command = [sys.executable, "-m", "flows", "preprocess", str(toml), "--store", dataset.store_url]
    seconds, core = list[float](), list[float]()
    for _ in range(settings.repeats):
        before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        seconds.append(time.perf_counter() - started_s)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        core.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "nothing new" in said, said
    yield {"items": dataset.num_items, "seconds": statistics.median(seconds), "core_seconds": statistics.median(core)}


def ahead(folder: Path, settings: argparse.Namespace) -> Iterator[Row]:
    """Seconds of an optimizer step of supervised training, from a store with and without latency.

    With latency also as it is without reading ahead: each micro-batch is read when it is needed.
    """
    dataset = Dataset(folder / "ahead", 256)
    for request in dataset.prepared.values():
        run(request, dataset.folder)
    planned = dataset.planned()
    run(requests.policy(planned), dataset.folder)
    numbers, found = count(), dict[str, list[float]]()
    for _ in range(settings.repeats):
        for name, patches in _STORES.items():
            request, steps = again(requests.finetune(planned, 0), next(numbers)), _Steps(dataset.folder / "outcome", 0)
            with pytest.MonkeyPatch.context() as patch:
                for patched, value in patches.items():
                    patch.setattr(store, patched, value)
                execute(request, Execution(), steps)
            found.setdefault(name, []).append(steps.seconds_a_step)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    slower = {name: seconds / medians["local"] for name, seconds in medians.items()}
    yield {"latency_s": LATENCY_S, "seconds_a_step": medians, "times_local": slower}


class _Steps(Outcome):
    """An outcome that notes when each optimizer step began."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._began_s: dict[int, float] = {}

    def progress(self, phase: str, step: int, total: int) -> None:
        """Note the beginning of a step."""
        super().progress(phase, step, total)
        if phase == "training":
            self._began_s.setdefault(step, time.perf_counter())

    @property
    def seconds_a_step(self) -> float:
        """Mean of all steps but the first."""
        first, *_, last = sorted(self._began_s)[1:]
        return (self._began_s[last] - self._began_s[first]) / (last - first)


_read = store.read


def _slow(*arguments: Any) -> bytes:
    time.sleep(LATENCY_S)
    return _read(*arguments)


def _when_needed(names: Iterable[Any], read: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    return ((name, read(name)) for name in names)


_STORES: dict[str, dict[str, Any]] = {
    "local": {},
    "slow": {"read": _slow},
    "slow, read when needed": {"read": _slow, "ahead": _when_needed},
}
PARTS = {part.__name__: part for part in (speed, memory, unchanged, ahead)}


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    settings = _parser().parse_args(argv)
    torch.set_num_threads(1)
    for name in settings.parts or PARTS:
        measured = record.Measured(settings)
        with tempfile.TemporaryDirectory() as folder:
            rows = [*PARTS[name](Path(folder), settings)]
        measured.write(f"data {name}", rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.data", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--items", type=int, default=1000, help="items whose speed is measured")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000], help="items whose memory is measured")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement of time; the median counts")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
