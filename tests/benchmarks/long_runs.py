"""Measure commands on finished runs of many iterations: ``status``, ``plan``, and the run's own command again.

``python -m tests.benchmarks.long_runs`` writes what came out into ``results/``. The runs are made without computing.
They lie in a folder, and on an S3 server of this machine, whose requests are counted in one more command.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flows.ledger.ledger import Ledger
from flows.ledger.pages import Entry, numbers
from flows.ledger.shape import shape_of
from flows.library.opened_run import open_run
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.post_train import steps
from flows.session import loop
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.records import place_of
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.execution.spending import Spent
from tests.benchmarks import one_core, record
from tests.faulty_proxy import faulty_proxy
from tests.flows.imagined import Imagined
from tests.hand_made import make
from tests.seaweed import BUCKET, S3_VARIABLES, SeaweedFS, started_seaweed

COMMANDS = ("status", "plan", "run")
RUN, MEMORY = "long", "/dev/shm"
"""A file system in memory: to make a run takes mostly flushes of small files."""
Made = tuple[dict[str, bytes], dict[str, Any]]


class Repeated(Imagined):
    """A run whose iterations hold the files of its first one: what these commands read of them are their records."""

    def __init__(self, run: Run, folder: Path) -> None:
        super().__init__(run, folder)
        self._ledger = Ledger(run.url, shape_of(run.plan), print)
        self._first: dict[str, Made] = {}

    def launch(self, name: str, *requests: Request) -> list[Manifest]:
        """Make a wave, with its page of the ledger."""
        page = self._ledger.page(name, time.monotonic())
        spent = Spent(interpreter_s=0.1, busy_s=0.9)
        told = [
            Entry(stage=r.stage, slot=place_of(r.slot), devices=1, seconds=1.0, outcome="made", spent=spent)
            for r in requests
        ]
        page.turn(lambda: told)
        found = super().launch(name, *requests)
        page.close(told)
        return found

    def made(self, request: Request) -> Manifest:
        """Make an artifact."""
        kind = request.slot.rpartition("/")[2]
        if request.iteration and kind in self._first:
            files, summary = self._first[kind]
            return make(request, files, **summary)
        manifest = super().made(request)
        artifact = Artifact(input_of(request.slot))
        self._first[kind] = {name: artifact.read(name) for name in artifact.names()}, manifest.summary
        return manifest


def settings_of(folder: Path, iterations: int) -> Settings:
    """A run of 24 samples an iteration, with two rewards."""
    recipe = one_core.recipe_without_validation(folder)
    return Settings(recipe, str(folder / "store"), RUN, iterations, overrides=one_core.sizes_of(24))


def made(folder: Path, iterations: int) -> tuple[Settings, int]:
    """Make the run, and return how many artifacts it has."""
    settings = settings_of(folder, iterations)
    run = Run(freeze(plan_of(settings), settings.store), settings.store)
    loop.make(run, Repeated(run, folder).launch)
    return settings, len(steps(run))


def words_of(command: str, settings: Settings, store: str) -> list[str]:
    """A command about the run in this store."""
    if command == "status":
        return ["status", RUN, "--store", store, "--json"]
    run = ["--store", store, "--run-id", RUN, "--iterations", str(settings.iterations)]
    return [command, settings.recipe, *run, *one_core.sets(settings.overrides)]


def seconds_of(words: Sequence[str], folder: Path, repeats: int, environment: dict[str, str]) -> dict[str, Any]:
    """Median seconds of a command, and their range."""
    some = [one_core.run(folder / "log.txt", *words, **environment).seconds for _ in range(repeats)]
    return {"command": words[0], "seconds": statistics.median(some), "range_s": [min(some), max(some)]}


def check_finished(folder: Path, settings: Settings, artifacts: int) -> None:
    """End this program unless all artifacts are current, and no stage was started."""
    run = open_run(RUN, settings.store)
    if (found := run.now().current) != artifacts or len(numbers(run.url)) != len({step.wave for step in run.steps}):
        told = (folder / "log.txt").read_text(encoding="utf-8")
        raise SystemExit(f"{found} of {artifacts} artifacts are current: {told}")


def upload(server: SeaweedFS, folder: Path, prefix: str) -> str:
    """Copy a store to the server, and return its URL there."""
    client = server.client()
    paths = [path for path in folder.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(16) as pool:
        put = [
            pool.submit(client.upload_file, str(path), BUCKET, f"{prefix}/{path.relative_to(folder)}") for path in paths
        ]
        for one in put:
            one.result()
    return f"s3://{BUCKET}/{prefix}"


def requests_of(words: Sequence[str], folder: Path, server: SeaweedFS) -> Counter[str]:
    """Requests of a command, by method."""
    with faulty_proxy(server.endpoint) as proxy:
        environment = server.variables | {f"{S3_VARIABLES}ENDPOINT_URL": proxy.endpoint}
        one_core.run(folder / "log.txt", *words, **environment)
        return Counter(proxy.asked)


def measure(folder: Path, iterations: int, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row a store and command."""
    began_s = time.perf_counter()
    settings, artifacts = made(folder, iterations)
    # A run writes its page at its end. These are made without one.
    one_core.run(folder / "log.txt", *words_of("run", settings, settings.store))
    about = {"iterations": iterations, "artifacts": artifacts}
    print(f"made {artifacts} artifacts in {time.perf_counter() - began_s:.1f} s", flush=True)
    if "local" in asked.stores:
        for command in asked.commands:
            words = words_of(command, settings, settings.store)
            yield about | {"store": "local"} | seconds_of(words, folder, asked.repeats, {})
            check_finished(folder, settings, artifacts)
    if "s3" in asked.stores:
        with started_seaweed(folder / "seaweed") as server:
            url = upload(server, Path(settings.store), "store")
            one_core.run(folder / "log.txt", *words_of("run", settings, url), **server.variables)
            for command in asked.commands:
                words = words_of(command, settings, url)
                row = about | {"store": "s3"} | seconds_of(words, folder, asked.repeats, server.variables)
                if iterations <= asked.counted:
                    methods = requests_of(words, folder, server)
                    row |= {"requests": methods.total(), "requests_by_method": dict(methods)}
                    row["requests_per_artifact"] = methods.total() / artifacts
                yield row


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    asked = _parser().parse_args(argv)
    measured = record.Measured(asked)
    rows: list[dict[str, Any]] = []
    for iterations in asked.iterations:
        with tempfile.TemporaryDirectory(dir=MEMORY if Path(MEMORY).is_dir() else None) as folder:
            for row in measure(Path(folder), iterations, asked):
                print(row, flush=True)
                rows.append(row)
    measured.write("long runs", rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.long_runs", description=__doc__)
    parser.add_argument("--iterations", type=int, nargs="+", default=[1, 60, 600], help="lengths of the runs")
    parser.add_argument("--stores", nargs="+", choices=("local", "s3"), default=["local", "s3"])
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=[*COMMANDS])
    counted = "iterations up to which requests are counted, which takes as long again"
    parser.add_argument("--counted", type=int, default=60, help=counted)
    parser.add_argument("--repeats", type=int, default=1, help="of each command; the median counts")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
