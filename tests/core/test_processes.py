"""This process: its age, its place among ranks, and its traffic."""

import os
import threading
import time
from pathlib import Path

import pytest

from cosmos_rl_core import processes
from cosmos_rl_core.processes import Traffic, age_s

PAUSE_S = 0.02


def test_the_age_of_a_process_that_begins_again_counts_from_its_request(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(processes.BEGAN, raising=False)
    whole_s = age_s()
    monkeypatch.setenv(processes.BEGAN, "")
    processes.begin_again()
    time.sleep(PAUSE_S)
    assert 0.99 * PAUSE_S < age_s() < whole_s


def test_variables_of_a_rank_are_set_and_taken_back(monkeypatch: pytest.MonkeyPatch):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", processes.MEETING, processes.HOST, processes.BEGAN)
    for name in names:
        monkeypatch.setenv(name, "before")
    processes.become_rank(5, 8, Path("/meet"), here=4, host="10.0.0.1")
    assert [os.environ[name] for name in names[:6]] == ["5", "5", "8", "4", "/meet", "10.0.0.1"]
    # A process that sees its own device alone, and no longer one of several nodes.
    processes.become_rank(1, 2, Path("/meet"), alone=True)
    assert [os.environ.get(name) for name in names[:6]] == ["1", "0", "2", "2", "/meet", None]
    processes.be_no_rank()
    assert not {*names} & {*os.environ}


def test_waits_inside_waits_and_in_other_threads_count_once():
    traffic, began_s = Traffic(), time.monotonic()

    def elsewhere() -> None:
        with traffic.waiting():
            time.sleep(PAUSE_S)

    other = threading.Thread(target=elsewhere)
    with traffic.waiting(), traffic.waiting():
        other.start()
        other.join()
    assert 0.99 * PAUSE_S < traffic.waited_s <= time.monotonic() - began_s
