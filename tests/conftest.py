"""Where tests compute, and stores to test on: a directory, and S3 from servers in own processes: moto, SeaweedFS."""

import gc
import importlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if "PYTEST_XDIST_WORKER" in os.environ:
    # Read when torch is imported. Workers that all compute on all cores are 40 times slower: they wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Until all tests are imported: a fifth of what that takes.
    gc.disable()

import fsspec
import psutil
import pytest
import torch

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.parallel.precision import use_attention, use_tf32
from tests import cpu_time, other_device
from tests.benchmarks import record

if TYPE_CHECKING:
    from tests.seaweed import SeaweedFS

pytest.register_assert_rewrite("cosmos_rl_core.conformance")

BUCKET = "tests"
STARTUP_TIMEOUT_S = 60
MEMORY, MEMORY_BYTES = "/dev/shm", 8 * 2**30
"""A file system in memory, and what must be free of it and of the machine's memory for tests to write there."""

pytest_runtest_call = cpu_time.pytest_runtest_call


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=("cpu", "cuda", "other"),
        default="cpu",
        help="where tests with the fixture `device` compute; elsewhere than on the CPU no other runs. `other` has the "
        "CPU's numbers and fails where something was not moved to it (tests/other_device.py)",
    )
    cpu_time.add_option(parser)
    parser.addoption("--results", type=Path, help="a folder for what the tests measured, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if _has_memory():
        # Runs flush each of their many small files, for which a disk takes a millisecond or more.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
    if config.getoption("--device") != "cuda":
        # Also where there is a GPU, and also in the processes that tests start.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    if not torch.cuda.is_available():
        raise pytest.UsageError(
            f"--device cuda (`make test-gpu`) needs a CUDA device, and torch {torch.__version__} finds none on this "
            "machine; nothing was tested. Without one, `make test` runs the same tests on the CPU"
        )
    # Read when cuBLAS is first used, also by the processes that tests start: the same bits twice.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # As stages compute, whose default this is.
    use_tf32(LaunchConfig().tf32)


@pytest.fixture(autouse=True, scope="module")
def plugins_of_this_module() -> Iterator[None]:
    """Forget the plugins that the tests of a module found, which later Requests would name."""
    yield
    outside_plugins.find([])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collect garbage again once all tests are imported, but never again among what these imports made."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") == "cpu":
        return
    here = [item for item in items if "device" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = here


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    folder: Path | None = config.getoption("--results")
    if folder is not None:
        reports = [
            report for kind in ("passed", "failed", "error", "skipped") for report in terminalreporter.getreports(kind)
        ]
        record.write_tests(folder, str(config.getoption("--device")), reports)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where tests compute: what ``--device`` says, the CPU by default."""
    name = str(request.config.getoption("--device"))
    if name == "other":
        with other_device.OtherDevice():
            yield other_device.DEVICE
    else:
        # As stages compute.
        use_attention("auto")
        yield torch.device(name, 0) if name == "cuda" else torch.device(name)


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """URL of an empty bucket; every process started from here on finds the server by its environment."""
    port = _free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        try:
            _wait_for(port, server)
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}"
        finally:
            os.kill(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="session")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SeaweedFS]":
    """A real S3 server."""
    # Imported here: the GPU lane runs these tests where there is no boto3.
    with importlib.import_module("tests.seaweed").started_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def seaweed(seaweed_server: "SeaweedFS", monkeypatch: pytest.MonkeyPatch) -> "SeaweedFS":
    """The server, which all s3:// URLs are at: cosmos-rl's variables come before AWS's, which lead to moto."""
    for name, value in seaweed_server.variables.items():
        monkeypatch.setenv(name, value)
    return seaweed_server


@pytest.fixture(params=["local", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of its own on each kind of store."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"{request.getfixturevalue('s3_url')}/{secrets.token_hex(8)}"


def _has_memory() -> bool:
    """Return whether there is room in memory, from which programs may be started."""
    try:
        found = os.statvfs(MEMORY)
    except OSError:
        return False
    may_start = not found.f_flag & os.ST_NOEXEC
    return may_start and min(found.f_bavail * found.f_frsize, psutil.virtual_memory().available) >= MEMORY_BYTES


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + STARTUP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            raise RuntimeError(f"moto.server ended with {server.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"moto.server did not listen on port {port} within {STARTUP_TIMEOUT_S} s")
