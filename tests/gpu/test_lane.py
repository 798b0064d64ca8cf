"""The lane on tiny shapes: it goes on where it was killed, keeps to its time, and needs no package but its own."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.flow_process import eventually
from tests.gpu import __main__ as program
from tests.gpu import chunks, lane, wheels

STARTUP_S = 300.0
ONLY = """
import sys
from importlib.machinery import PathFinder

ABSENT = {absent!r}
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else super().find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""A ``sitecustomize`` under which some packages are not there, and this project is not installed."""


def parts_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}


def absent() -> list[str]:
    """Return the modules of this environment that neither the bundle nor its image has."""
    _, needed_by = wheels.locked(wheels.LOCK.read_text(encoding="utf-8"))
    image = wheels.image_of(wheels.IMAGE.read_text(encoding="utf-8"))
    present = wheels.needed(image, set(), needed_by) | wheels.needed(wheels.NEEDED, image, needed_by)
    by_module = importlib.metadata.packages_distributions()
    locked = needed_by.keys() - present
    return sorted(module for module, names in by_module.items() if {*map(wheels.name_of, names)} <= locked)


def test_parts_that_ended_badly_come_after_those_that_have_not_begun(tmp_path: Path):
    results = lane.Results(tmp_path / "lane.json")
    counted, machine, bits, *_ = lane.PARTS[4:]
    results.put(machine, {"outcome": "failed", "rows": []})
    results.put(bits, {"outcome": "done", "rows": []})
    chosen = lane.chosen(lane.Results(results.path), [], on_device=True)
    assert chosen[-1] == machine
    assert bits not in chosen
    assert len(chosen) == len(lane.PARTS) - 1
    without = lane.chosen(results, [], on_device=False)
    assert counted in without
    assert not any(part.on_device for part in without)


def test_no_part_begins_that_does_not_fit_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = tmp_path / "lane.json"
    assert program.main(["machine", "bits", "--tiny", "--minutes", "0.01", "--results", str(results)]) == program.AGAIN
    assert "left for another run: bits" in capsys.readouterr().out
    assert not results.exists()


def test_a_part_that_takes_too_long_is_ended_with_what_it_had(tmp_path: Path):
    words = [sys.executable, "-m", "tests.gpu.worker"]
    worker = lane.Worker(words, tmp_path / "lane.log")
    rows = list[dict[str, Any]]()
    order = {"work": "machine.rows", "options": [], "tiny": True, "known": {}}
    assert worker.do(order, 0.05, rows.append)[0] == "too long"
    assert rows == []
    assert not any("tests.gpu.worker" in child.cmdline() for child in psutil.Process().children())


def test_every_test_of_the_fixture_device_is_in_a_chunk():
    """By their sources: what asks for the fixture, or for the models that are made on it."""
    tests = chunks.ROOT / "tests"
    asks = re.compile(r"^def test_\w+\([^)]*\b(?:(?:device|gpu): torch\.device|family: Family)", re.MULTILINE)
    found = {
        path.relative_to(tests).as_posix()
        for path in tests.rglob("test_*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    assert found <= {name for files in chunks.CHUNKS.values() for name in files}


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_lane_goes_on_and_all_its_parts_end_well_without_other_packages(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(ONLY.format(absent=absent()), encoding="utf-8")
    results = tmp_path / "lane.json"
    words = [sys.executable, "-m", "tests.gpu", "--tiny", "--minutes", "60", "--results", str(results)]
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(words, cwd=chunks.ROOT, env=environment) as killed:
        second = lane.PARTS[1].name
        assert eventually(lambda: second in parts_in(results), STARTUP_S)
        worker = psutil.Process(killed.pid).children()
        killed.send_signal(signal.SIGKILL)
    assert eventually(lambda: not any(one.is_running() and one.status() != "zombie" for one in worker), STARTUP_S)
    before = parts_in(results)
    assert before[lane.PARTS[0].name]["outcome"] == "done"
    began_s = time.monotonic()
    ended = subprocess.run(words, cwd=chunks.ROOT, env=environment, check=False)
    assert ended.returncode == 0, results.with_suffix(".log").read_text(encoding="utf-8")[-4000:]
    parts = parts_in(results)
    assert parts.keys() == {part.name for part in lane.PARTS}
    assert all(part["outcome"] == "done" and part["rows"] for part in parts.values())
    assert parts[lane.PARTS[0].name] == before[lane.PARTS[0].name]
    assert sum(part["seconds"] for part in parts.values()) < time.monotonic() - began_s + before_seconds(before)
    bits = [row for row in parts["bits"]["rows"] if row["what"] == "bits"]
    assert bits
    assert all(row["warm_is_cold"] for row in bits)
    causes = [row for row in parts["shape sd3_5_medium"]["rows"] if row["what"] == "causes"]
    assert all(sum(row["by_cause"].values()) > 0 for row in causes)
    # The same command has nothing left to do.
    assert subprocess.run(words, cwd=chunks.ROOT, env=environment, check=False).returncode == 0
    assert parts_in(results) == parts


def before_seconds(parts: dict[str, Any]) -> float:
    return sum(part.get("seconds", 0.0) for part in parts.values())
