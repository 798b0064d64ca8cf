"""The conformance suite on plugins outside this package, in a process of its own, and then runs of models."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from cosmos_rl_core.errors import EXIT_CODES, ConfigError, CosmosRLError
from flows.plugin_checks import tiny_runs
from flows.plugin_checks.tiny_runs import Note

SUITE = "cosmos_rl_core.conformance"
ENGINE = "pytest"
FAILED = 1
"""Exit code if a check failed."""
VARIABLES = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
"""Environment of the suite: the same on every machine, and without a network. More threads slow tiny models down."""


def run_suite(paths: Sequence[str], options: Sequence[str], only: str, note: Note) -> dict[str, Any]:
    """Return the results of the suite and of the runs of models: totals, and ``plugins`` with the results of each.

    Only checks whose sentence contains ``only`` are made. Progress of the suite goes to stderr, of runs to ``note``.
    Raises :class:`ConfigError` for paths that hold no plugin, for a plugin without the parts that checks need, and if
    no check's sentence contains ``only``.
    """
    if find_spec(ENGINE) is None:
        raise ConfigError(f"the suite needs {ENGINE}: pip install 'cosmos-rl-flows[check]'")
    with tempfile.TemporaryDirectory() as folder:
        found = _of_suite([*paths, *options, "--only", only], Path(folder) / "results")
        bases = found.pop("bases")
        for one in found["plugins"]:
            if one["kind"] == "models" and one["name"] in bases:
                (runs := Path(folder) / one["name"]).mkdir()
                tiny_runs.check(one, bases[one["name"]], runs, only, note)
    totals = {name: sum(one[name] for one in found["plugins"]) for name in ("passed", "failed")}
    totals["skipped"] = sum(len(one["skipped"]) for one in found["plugins"])
    if only and not any(totals.values()):
        raise ConfigError(f"no check has {only!r} in its sentence")
    return totals | found


def _of_suite(words: Sequence[str], results: Path) -> dict[str, Any]:
    """Run the suite and return the results that it wrote to the file ``results``."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | VARIABLES
    # -P: a folder in the working directory does not hide a package of the same name.
    command = [sys.executable, "-P", "-m", SUITE, *words, "--results", str(results)]
    stderr = 2
    ended = subprocess.run(command, env=environment, stdout=stderr, check=False)
    found = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    if mistake := found.get("mistake"):
        raise ConfigError(mistake) if ended.returncode == EXIT_CODES["config"] else CosmosRLError(mistake)
    if "plugins" not in found:
        raise CosmosRLError(f"the suite ended with exit code {ended.returncode}; its output is above")
    return found


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each plugin, then each failure with advice, then a line of totals."""
    rows = [(one["kind"], one["name"], _counts(one), one["path"]) for one in found["plugins"]]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    yield from ("  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows)
    for one in found["plugins"]:
        for message, alike in groupby(one["failures"], key=lambda failure: failure["message"]):
            first, *others = alike
            yield ""
            yield f"FAILED {one['path']}: {first['check']}"
            yield from (f"    {line}" for line in message.splitlines())
            if others:
                yield f"    so did {len(others)} more"
            if first["place"]:
                yield f"    {first['place']}"
    yield ""
    yield f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} did not apply"


def _counts(one: dict[str, Any]) -> str:
    failed = f", {one['failed']} FAILED" if one["failed"] else ""
    return f"{one['passed']} passed{failed}"
