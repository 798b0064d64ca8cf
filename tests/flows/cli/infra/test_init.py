"""The objects of a run's server, where there is no server or none that answers."""

import subprocess
import sys

import httpx
import pytest

from flows.running.server import not_answering
from tests.flows.cli.test_app import ROOT, invoke

NO_SERVER = "http://127.0.0.1:9/api"


def test_init_without_a_named_server_says_how_to_start_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    ended = invoke("infra", "init")
    assert ended.exit_code == 64
    assert "no Prefect server is named: start one with `prefect server start`" in ended.stderr


def test_an_error_of_a_silent_server_is_told_from_other_errors():
    error = RuntimeError("as Prefect says it")
    error.__cause__ = httpx.ConnectError("Connection refused")
    found = not_answering(error)
    assert found is not None
    assert "does not answer (Connection refused); start it with `prefect server start`" in str(found)
    assert not_answering(LookupError("another")) is None


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_reported():
    # A process of its own, because Prefect reads its settings once.
    ended = subprocess.run(
        [sys.executable, "-m", "flows", "infra", "init"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PATH": "", "PREFECT_API_URL": NO_SERVER, "PREFECT_CLIENT_MAX_RETRIES": "0"},
    )
    assert ended.returncode == 75
    assert ended.stderr.startswith(f"Prefect's server at {NO_SERVER} does not answer")
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
