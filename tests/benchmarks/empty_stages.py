"""Measure what a stage costs that does almost nothing, by cause, in warm and in cold mode, on one core.

``python -m tests.benchmarks.empty_stages`` writes what came out into ``results/``. The causes are those that the ledger
of a run records of each attempt; of a cold start the imports are told by package too.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from flows.ledger.pages import Entry, iteration_of, pages
from flows.library.opened_run import open_run
from stages.registry import module_of
from tests.benchmarks import one_core, record

STAGES = ("warn", "export")
"""Both are alone in their waves: one without torch, one with it."""
CAUSES = ("interpreter_s", "imports_s", "load_s", "first_step_s", "busy_s", "waiting_s")
SMALL = ("policy.diffusers.sample.num_steps=4", "train.ckpt.export_every=1")
RUNNER, RUNTIME = "stages.execution.runner", "stages.execution.torch_runtime"
IMPORTS = {
    "warn": (RUNNER, module_of("warn")),
    "export": (RUNNER, RUNTIME, module_of("export")),
    "flow": ("flows.cli.making.run", "flows.session.session"),
}
"""What a cold process imports: of a stage, and of the command that runs a recipe."""
SHOWN_S = 0.02
"""Packages that take less are summed as others."""


def attempts(folder: Path, mode: str, iterations: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of attempts by stage and cause, and those between waves, after the first iteration of a run."""
    recipe = one_core.recipe_without_validation(folder)
    overrides = [*one_core.sizes_of(24), *SMALL, f"launch.mode={mode}"]
    place = ["--store", str(folder / mode), "--run-id", "small", "--iterations", str(iterations + 1)]
    ended = one_core.run(folder / "log.txt", "run", recipe, *place, *one_core.sets(overrides))
    every = list(pages(open_run("small", str(folder / mode)).url))
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for page, following in pairwise(every):
        if every.index(page) < next(i for i, one in enumerate(every) if iteration_of(one.wave) == 1):
            continue
        found["between waves"].append({"seconds": following.began - page.began - page.wall_s})
        for entry in page.entries if len(page.entries) == 1 else ():
            if entry.stage in STAGES:
                found[entry.stage].append(_parts(entry) | {"in_wave_s": page.wall_s - entry.seconds})
    found["before the first wave"].append({"seconds": every[0].began - ended.began})
    last = every[-1].began + every[-1].wall_s
    found["after the last wave"].append({"seconds": ended.began + ended.seconds - last})
    return found


def _parts(entry: Entry) -> dict[str, float]:
    causes = {cause: float(getattr(entry.spent, cause)) for cause in CAUSES}
    return {"seconds": entry.seconds, **causes, "outside_s": entry.outside_s}


def rows_of(mode: str, found: dict[str, list[dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """Medians by cause."""
    for what, some in found.items():
        medians = {name: statistics.median(one[name] for one in some) for name in some[0]}
        yield {"mode": mode, "what": what, "attempts": len(some)} | medians


def imports(what: str) -> dict[str, Any]:
    """Seconds that a cold process takes to import what it needs, by package, and of Python alone."""
    words = [sys.executable, "-X", "importtime", "-c", f"import {', '.join(IMPORTS[what])}"]
    with one_core.start(words, subprocess.PIPE, errors=subprocess.PIPE) as process:
        _, said = process.communicate()
    if process.returncode:
        raise SystemExit(said)
    lines = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", said)
    sums: Counter[str] = Counter()
    for micros, name in lines:
        sums[name.partition(".")[0]] += int(micros)
    seconds = {name: micros / 1e6 for name, micros in sums.most_common()}
    shown = {name: taken for name, taken in seconds.items() if taken >= SHOWN_S}
    shown["others"] = sum(seconds.values()) - sum(shown.values())
    return {"what": what, "seconds": sum(seconds.values()), "modules": len(lines), "by_package": shown}


def main(argv: list[str]) -> int:
    """Measure and write; returns the exit code."""
    settings = _parser().parse_args(argv)
    measured = record.Measured(settings)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for mode in ("warm", "cold"):
            rows += rows_of(mode, attempts(Path(folder), mode, settings.iterations))
    imported = [imports(what) for what in IMPORTS]
    measured.write("empty stages", rows, imports=imported)
    for row in [*rows, *imported]:
        print(row)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.empty_stages", description=__doc__)
    parser.add_argument("--iterations", type=int, default=3, help="that are told, after one that is not")
    parser.add_argument("--output", type=Path, default=record.FOLDER, help="where the JSON goes")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
