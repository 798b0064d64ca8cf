"""Folders of flows that were killed."""

import errno
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flows.defaults import GRACE_H
from flows.devices.work_folders import PREFIX, WorkFolder, remove_abandoned
from stages.artifacts.request import REQUEST
from tests.flows.by_hand import whole_run
from tests.flows.garbage.test_gc import collect, written


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR without folders of others."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


FLOW = """
import json
import sys

from flows.devices.work_folders import WorkFolder

folder = WorkFolder("rollout")
(folder.path / "request.json").write_text(json.dumps({"slot": sys.argv[1]}))
print("written", flush=True)
input()
"""


def test_folders_of_flows_that_were_killed_go_and_others_stay(recipe, tmp_path, temporary):
    run = whole_run(recipe, tmp_path)
    ours = WorkFolder("update")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    slots = (f"{run.url}/iterations/0000/rollout", f"{run.url}-2/iterations/0000/rollout")
    flows = [subprocess.Popen([sys.executable, "-c", FLOW, slot], **pipes, cwd=Path.cwd()) for slot in slots]
    for flow in flows:
        assert flow.stdout is not None
        assert flow.stdout.readline() == "written\n"
    assert collect(run) == [f"nothing to delete in {run.url}"]
    for flow in flows:
        flow.kill()
        flow.communicate()
    assert collect(run, older_than_h=GRACE_H) == [f"nothing to delete in {run.url}"]
    assert collect(run)[0].split() == ["folders", "in", str(temporary), "1", "files", "0.0", "MB"]
    # Another run may have just begun.
    (other,) = set(temporary.iterdir()) - {ours.path}
    assert json.loads((other / "request.json").read_text())["slot"] == slots[1]
    for path in (other, other / "request.json"):
        written(str(path), GRACE_H + 0.1)
    assert collect(run)[0].split() == ["folders", "in", str(temporary), "1", "files", "0.0", "MB"]
    ours.remove()
    assert list(temporary.iterdir()) == []


def test_the_run_that_goes_on_removes_the_folders_of_its_killed_flow_and_no_others(recipe, tmp_path, temporary):
    run = whole_run(recipe, tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    slots = [f"{run.url}{name}/iterations/0000/rollout" for name in ("", "", "-2")]
    flows = [subprocess.Popen([sys.executable, "-c", FLOW, slot], **pipes, cwd=Path.cwd()) for slot in slots]
    for flow in flows:
        assert flow.stdout is not None
        assert flow.stdout.readline() == "written\n"
    killed, alive, other = flows
    for flow in (killed, other):
        flow.kill()
        flow.communicate()
    (unknown := temporary / f"{PREFIX}update-x").mkdir()
    remove_abandoned(run.url)
    left = {json.loads((path / "request.json").read_text())["slot"] for path in temporary.iterdir() if path != unknown}
    # One of this run is in use, the others may be of runs that have just begun.
    assert (left, len(list(temporary.iterdir()))) == ({slots[1], slots[2]}, 3)
    alive.kill()
    alive.communicate()
    remove_abandoned(run.url)
    (last,) = set(temporary.iterdir()) - {unknown}
    assert json.loads((last / "request.json").read_text())["slot"] == slots[2]


def test_an_unreadable_folder_ends_no_run(recipe, tmp_path, temporary, monkeypatch):
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    run = whole_run(recipe, tmp_path)
    (folder := temporary / f"{PREFIX}rollout-x").mkdir()
    (folder / REQUEST).write_text(json.dumps({"slot": f"{run.url}/iterations/0000/rollout"}))
    monkeypatch.setattr("fcntl.flock", fails)
    remove_abandoned(run.url)
    assert folder.exists()
