"""Disks that are really full: a small file system of memory. The same command goes on when there is room."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import NoSpaceError, StageError
from flows.running.server import prefect_server
from tests.faults.bases import Bases
from tests.faults.disk import fill, may_mount, play, small_disk
from tests.faults.kill import SAME
from tests.flows.allocated import Work

pytestmark = pytest.mark.processes


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room."""
    if not may_mount(tmp_path / "disk"):
        pytest.skip("this process may not mount a tmpfs")
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_prefects_own_server_names_the_disk_that_its_database_has_no_room_on(
    disk: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(disk))
    fill(disk)
    with pytest.raises(NoSpaceError, match=f"did not start .*no space left in {disk};"), prefect_server():
        raise AssertionError("it started")


def make_flows(url: str) -> None:
    """Have the server write until it cannot; pages of its database that are free may take the first ones."""
    for number in range(500):
        flow = {"name": f"{number} {'x' * 200}"}
        httpx.post(f"{url}/flows/", json=flow, timeout=60).raise_for_status()


@pytest.mark.slow
def test_a_full_disk_of_a_server_that_runs_is_named_too(disk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(disk))

    def work() -> None:
        with prefect_server():
            fill(disk)
            make_flows(os.environ["PREFECT_API_URL"])

    with pytest.raises(NoSpaceError, match=f"server failed: no space left in {disk};"):
        work()


def test_a_stage_whose_folder_has_no_room_for_its_reason_names_the_disk(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    work = Work(tmp_path, monkeypatch)
    waves = work.launcher(LaunchConfig())

    def end() -> None:
        if (ran := work.ran()) and not (disk / "filler").exists():
            fill(disk)
            os.kill(int(ran[0][-1]), signal.SIGKILL)

    waves.check = end
    with pytest.raises(StageError, match=f"exit code -9; no space left in {disk}/.*: free some, or set TMPDIR"):
        waves.make("report", [work.request("report")])
    waves.close()


def test_a_preparation_goes_on_when_a_full_disk_has_room_again(tmp_path: Path):
    if not may_mount(tmp_path / "tried"):
        pytest.skip("this process may not mount a tmpfs")
    found = play("preprocess", 1, Bases(tmp_path))
    assert found.outcome == SAME
    assert found.codes == [75]
