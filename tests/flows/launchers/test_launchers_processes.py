"""Processes of a launcher, warm ones among them."""

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import StageError
from flows.launchers._processes import WarmProcess, WarmServer


@pytest.mark.processes
def test_forks_end_with_their_own_code_or_with_their_server(tmp_path: Path) -> None:
    # Opening it waits for a writer: a stage that works until it is killed.
    endless = tmp_path / "endless.json"
    os.mkfifo(endless)
    broken = tmp_path / "broken.json"
    broken.write_text("{}", encoding="utf-8")
    log = tmp_path / "log.txt"

    server = WarmServer(LaunchConfig())
    try:
        assert _returncodes([server.start("report", broken, log)], 30) == [64]
        assert server.is_running
        forks = [server.start("report", endless, log) for _ in range(2)]
        assert [fork.poll() for fork in forks] == [None, None]
        psutil.Process(psutil.Process(forks[0].pid).ppid()).kill()
        with pytest.raises(StageError) as error:
            server.start("report", endless, log)
        assert error.value.kind == "killed"
        assert _returncodes(forks, 10) == [-signal.SIGKILL] * 2
        assert not server.is_running
    finally:
        server.close()


def _returncodes(forks: list[WarmProcess], timeout_s: float) -> list[int | None]:
    """How they ended; None where that is not known in time, be it that nobody says so or that asking blocks."""
    found: list[int | None] = [None] * len(forks)

    def ask() -> None:
        for i, fork in enumerate(forks):
            while found[i] is None:
                found[i] = fork.poll()
                time.sleep(0.01)

    # A daemon, so that one that blocks does not keep the tests from ending.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    return found
