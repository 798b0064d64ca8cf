"""What the flight check says where something is wrong."""

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.storage import store
from flows.devices.devices import VISIBLE
from flows.operations import flight_check


@pytest.mark.slow
def test_ranks_that_cannot_reach_each_other_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    found = flight_check.find("ring", "", LaunchConfig())
    assert found.word == "failed"
    assert re.search(r"2 ranks could not sum a tensor: .*Error: .*nowhere", found.detail)


def test_a_broken_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho couldn\\'t communicate with the NVIDIA driver\nexit 9\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = flight_check.find("gpus", "", LaunchConfig())
    assert found.word == "failed"
    assert found.detail == "nvidia-smi failed: couldn't communicate with the NVIDIA driver"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where CUDA cannot be used")
def test_a_profile_of_gpus_fails_where_cuda_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-aaaa1111-0000,GPU-bbbb2222-0000")
    for launch in (LaunchConfig(device="cuda", processes=2), LaunchConfig(processes=2)):
        ring = flight_check.find("ring", "", launch)
        assert ring.word == "failed"
        assert re.search(r"2 ranks could not sum a tensor: .*launch\.device = 'cuda', and .* cannot use", ring.detail)
    assert "3 GPUs each" in flight_check.find("gpus", "", LaunchConfig(processes=3)).detail
    monkeypatch.setenv(VISIBLE, "")
    missing = flight_check.find("gpus", "", LaunchConfig(device="cuda"))
    assert (missing.word, "this machine shows no GPU" in missing.detail) == ("failed", True)


def test_a_check_of_a_store_leaves_no_files_even_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert flight_check.find("store", str(tmp_path), LaunchConfig()).word == "ok"

    def fails(url: str) -> bytes:
        raise UnavailableError(f"cannot read {url}")

    monkeypatch.setattr(store, "read", fails)
    assert flight_check.find("store", str(tmp_path), LaunchConfig()).word == "failed"
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == {".check", ".check/.probe"}


class Elsewhere(BaseHTTPRequestHandler):
    """A server of something else, which knows no path."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of a server that is not Prefect's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()
        thread.join()


def test_an_address_that_answers_like_another_server_is_named_and_questioned(elsewhere: str) -> None:
    with temporary_settings({PREFECT_API_URL: elsewhere, PREFECT_CLIENT_MAX_RETRIES: 0}):
        found = flight_check.find("server", "", LaunchConfig())
    assert found.word == "failed"
    assert found.detail.startswith(elsewhere)
    assert found.detail.endswith(" answers 404 Not Found; is this the right address?")
