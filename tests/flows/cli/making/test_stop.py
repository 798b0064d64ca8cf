"""The end of a run from elsewhere."""

import threading
from pathlib import Path

import pytest

from cosmos_rl_core.errors import StoppedError
from flows.library import open_run
from flows.planning.run import Run
from flows.running.progress import Reporter
from tests.flows.by_hand import whole_run
from tests.flows.cli.test_app import invoke


@pytest.fixture
def run(recipe, tmp_path: Path) -> Run:
    return whole_run(recipe, tmp_path)


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
