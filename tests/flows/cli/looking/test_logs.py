"""The logs of a run: which there are, and how one is printed."""

import json
from pathlib import Path

import pytest

from cosmos_rl_core.storage import store
from flows.planning.run import Run
from tests.flows.by_hand import whole_run
from tests.flows.cli.test_app import invoke

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
