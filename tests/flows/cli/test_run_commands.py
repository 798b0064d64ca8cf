"""The logs of a run, its end from elsewhere, and its deletion."""

import json
import threading
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_rl_core.errors import StageError, StoppedError
from cosmos_rl_core.storage import store
from flows.cli import app as cli
from flows.library import open_run
from flows.operations.stop import stop
from flows.planning.run import Run
from flows.running.progress import Reporter
from tests.flows.by_hand import make_all, whole_run
from tests.flows.cli.test_app import invoke
from tests.hand_made import planned

LOGS = {
    "20250131T120000-aaaa.log": b"generate:  1%|\rgenerate: 99%|\nTypeError: \x1b[31mno\n",
    "20250131T120507-bbbb.log": b"done\n",
}


@pytest.fixture
def run(recipe, tmp_path: Path) -> Run:
    """A whole run, whose last update took two attempts."""
    run = whole_run(recipe, tmp_path)
    for name, data in LOGS.items():
        store.write(store.join(run.slots.iteration(1, "update"), "logs", name), data)
    store.write(store.join(run.slots.iteration(0, "update"), "logs", "20250131T115900-cccc.log"), b"first\n")
    return run


def test_logs_lists_the_attempts_of_all_stages(run):
    rows = [line.split() for line in invoke("logs", "hand", "--store", run.store_url).stdout.splitlines()]
    assert rows[1:4] == [
        ["iteration-0000/update", "1", "2025-01-31", "11:59:00", "6"],
        ["iteration-0001/update", "1", "2025-01-31", "12:00:00", "49"],
        ["iteration-0001/update", "2", "2025-01-31", "12:05:07", "5"],
    ]
    found = json.loads(invoke("logs", "hand", "--iteration", 1, "--json", "--store", run.store_url).stdout)
    assert [(log["name"], log["attempt"]) for log in found] == [("iteration-0001/update", n) for n in (1, 2)]


def test_a_log_is_printed_line_by_line_and_without_control_characters(run):
    def printed(*options: object) -> str:
        return invoke("logs", "hand", "--stage", "update", *options, "--store", run.store_url).stdout

    assert printed() == "done\n"
    assert printed("--iteration", 0) == "first\n"
    first = printed("--iteration", 1, "--attempt", 1)
    assert first.splitlines() == ["generate:  1%|", "generate: 99%|", r"TypeError: \x1b[31mno"]
    for options, said in (
        (["--stage", "update", "--iteration", 1, "--attempt", 3], "iteration-0001/update has attempts 1 to 2"),
        (["--stage", "updat"], "did you mean 'update'?"),
        (["--stage", "rollout"], "hand has no such log"),
        (["--attempt", 1], "add --stage"),
    ):
        ended = invoke("logs", "hand", *options, "--store", run.store_url)
        assert (ended.exit_code, said in ended.stderr) == (64, True), ended.stderr


class Working(threading.Thread):
    """The part of a flow that holds the lease of a run and asks it whether to go on."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run_of, self.began, self.end = run, threading.Event(), ""
        self.heeds = True
        self.left = threading.Event()

    def run(self) -> None:
        try:
            with self.run_of.lease() as lease, Reporter(self.run_of.url):
                self.began.set()
                while not self.left.wait(0.05):
                    if self.heeds:
                        lease.check()
        except StoppedError as error:
            self.end = str(error)


def test_a_run_at_work_ends_when_it_is_asked_to(run):
    working = Working(run)
    working.start()
    assert working.began.wait(30)
    ended = invoke("stop", "hand", "--store", run.store_url)
    working.join(30)
    assert ended.exit_code == 0
    assert "hand is stopped: process " in ended.stdout
    assert working.end.startswith("stopped by ")
    assert open_run("hand", run.store_url).now().life == "stopped"
    # The next holder is not the one that was asked.
    with run.lease() as lease:
        lease.check()


def test_a_process_that_does_not_end_is_named(run):
    working = Working(run)
    working.heeds = False
    working.start()
    assert working.began.wait(30)
    with pytest.raises(StageError, match="still works on hand after 0 s; wait, or end it there: kill ") as busy:
        stop(run.store_url, "hand", 0.0)
    assert busy.value.exit_code == 75
    working.left.set()
    working.join()
    assert "no process works on hand" in invoke("stop", "hand", "--store", run.store_url).stdout


def test_a_deletion_is_asked_for_says_its_bytes_and_leaves_nothing(run):
    folder = Path(run.url)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    refused = invoke("delete", "hand", "--store", run.store_url)
    assert (refused.exit_code, "add --yes" in refused.stderr) == (64, True)
    shown = json.loads(invoke("delete", "hand", "--dry-run", "--json", "--store", run.store_url).stdout)
    assert (shown["bytes"], shown["deleted"]) == (size, False)
    assert folder.is_dir()
    ended = invoke("delete", "hand", "--yes", "--store", run.store_url)
    assert (ended.exit_code, ended.stdout.startswith(f"deleted {folder}: ")) == (0, True)
    assert not folder.exists()
    assert "has no runs" in invoke("runs", "--store", run.store_url).stdout
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 64


def test_a_run_at_work_is_not_deleted(run):
    with run.lease():
        ended = invoke("delete", "hand", "--yes", "--store", run.store_url)
    assert (ended.exit_code, "another process works on" in ended.stderr) == (75, True)
    assert open_run("hand", run.store_url).now().current == 23


def test_what_another_run_reads_is_not_deleted(run, recipe, tmp_path):
    planned(recipe(), tmp_path, run_id="later", overrides=("policy.init_from=hand@0",))
    ended = invoke("delete", "hand", "--yes", "--store", run.store_url)
    assert (ended.exit_code, "later read artifacts of hand" in ended.stderr) == (64, True)
    assert invoke("delete", "later", "--yes", "--store", run.store_url).exit_code == 0
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 0


@pytest.mark.parametrize("damage", [b"{", None])
def test_a_damaged_run_can_be_deleted(run, damage):
    plan = Path(run.url) / "plan.json"
    plan.unlink() if damage is None else plan.write_bytes(damage)
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 0
    assert not Path(run.url).exists()


def test_a_deletion_that_was_killed_is_finished_by_the_next_one(run, recipe, tmp_path):
    make_all(planned(recipe(), tmp_path, run_id="other"))
    (Path(run.url) / "plan.json").unlink()
    listed = CliRunner().invoke(cli.app, ["runs", "--store", run.store_url])
    assert "hand is damaged: " in listed.stdout
    assert invoke("delete", "hand", "--yes", "--store", run.store_url).exit_code == 0
    assert invoke("runs", "--store", run.store_url).exit_code == 0


def test_the_commands_are_listed_in_groups():
    shown = invoke("--help").stdout
    for title in ("Make and end runs", "Look at runs", "Prove and compare", "Data and rewards", "Keep the house"):
        assert f"─ {title} ─" in shown
    assert "─ Commands ─" not in shown


def test_every_package_tells_type_checkers_that_it_is_typed():
    root = Path(cli.__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    for package in ("flows", "stages", "cosmos_rl_core"):
        assert (root / package / "py.typed").read_bytes() == b""
        assert "py.typed" in data[package]
