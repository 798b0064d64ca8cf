"""Killed processes are waited for, and no longer than they take."""

import subprocess
import sys
import time

import psutil
import pytest

from cosmos_rl_core import process_trees
from cosmos_rl_core.process_trees import Watched, kill, kill_tree, tree

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.processes
def test_a_killed_process_that_its_parent_does_not_wait_for_is_not_waited_for_either():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        began_s = time.monotonic()
        kill([child])
        assert child.status() == psutil.STATUS_ZOMBIE
        assert time.monotonic() - began_s < 5
        assert [process.pid for process in tree(parent.pid)] == [parent.pid, child.pid]
        kill_tree(parent.pid)
        assert time.monotonic() - began_s < 10
        assert not tree(parent.pid) or psutil.Process(parent.pid).status() == psutil.STATUS_ZOMBIE
    kill([child])


def test_children_of_a_process_that_has_ended_are_ended_too(monkeypatch):
    monkeypatch.setattr(process_trees, "TREE_INTERVAL_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        watched = Watched(parent)
        assert watched.poll() is None
        parent.kill()
        while psutil.Process(parent.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        # Now the child has another parent, and no look at the zombie finds it.
        assert watched.poll() == -9
        assert child.is_running()
        watched.end()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
