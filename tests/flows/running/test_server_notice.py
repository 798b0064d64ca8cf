"""What is said before a command waits for a Prefect server of its own."""

import subprocess
from pathlib import Path

import pytest

from flows.running import server


class StartedError(Exception):
    """Raised in place of starting a process."""


@pytest.fixture(autouse=True)
def no_server_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in server.QUIET.items():
        monkeypatch.setenv(name, value)
    for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))

    def started(*_: object, **__: object) -> None:
        raise StartedError

    monkeypatch.setattr(subprocess, "Popen", started)


def test_a_command_says_that_its_server_takes_time_before_it_starts_one(capfd: pytest.CaptureFixture[str]):
    with pytest.raises(StartedError), server.prefect_server():
        pass
    out, err = capfd.readouterr()
    assert err == "starting a Prefect server for this command, at the first time for half a minute\n"
    # Standard output is for what the command answers.
    assert out == ""


def test_a_named_server_is_not_announced(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with server.prefect_server():
        pass
    assert capfd.readouterr() == ("", "")
