"""A Prefect server for one command, where none is configured. It dies with the command, however the command dies."""

import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import httpx

from cosmos_rl_core.errors import UnavailableError
from cosmos_rl_core.processes import BOUND, PARENT

OWN = "COSMOS_FLOWS_OWN_SERVER"
"""Environment variable: set while the server is one of :func:`prefect_server`'s own."""
OVERLOADED = {429, 500, 502, 503, 504}
"""HTTP statuses: too many requests, internal error, bad gateway, service unavailable, gateway timeout."""
UVICORN = ("-m", "uvicorn", "--factory", "prefect.server.api.server:create_app")
STARTUP_S = 120.0
"""The first start on a machine makes the database."""

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # What the automation of `cosmos-flows infra init` listens to, as in deployments/prefect.yaml.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Tries of a request, in about a minute in all: longer than a server takes to start again.
    "PREFECT_CLIENT_MAX_RETRIES": "6",
    # The console shows our own lines; Prefect's go to its UI.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}
"""Prefect's settings on a laptop; whatever the environment says already stays."""


@contextmanager
def prefect_server() -> Iterator[None]:
    """Set ``PREFECT_API_URL`` to a server of our own on 127.0.0.1, unless it is set. Enter before Prefect is imported.

    Prefect's own temporary server is stopped by an exit handler, which a killed process does not run.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if named_server() is not None:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "error")
    server = subprocess.Popen(
        [sys.executable, *BOUND, sys.executable, *UVICORN, *where],
        env=os.environ | {PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Ctrl-C goes to the whole process group; the flow still has to tell this server how it ended.
        start_new_session=True,
    )
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}/api")
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        os.environ[OWN] = "1"
        # Log lines are sent late, by a thread that would still be sending when this server is gone.
        os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")
        yield
    finally:
        for name in ("PREFECT_API_URL", OWN):
            os.environ.pop(name, None)
        server.terminate()
        server.wait()


def server_is_own() -> bool:
    """Whether the server is this command's alone."""
    return OWN in os.environ


def named_server() -> str | None:
    """URL of the server that the environment or Prefect's active profile, as `prefect config set` writes it, names."""
    if "PREFECT_API_URL" in os.environ:
        return os.environ["PREFECT_API_URL"]
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    if not path.is_file():
        return None
    written = tomllib.loads(path.read_text(encoding="utf-8"))
    active = os.environ.get("PREFECT_PROFILE", written.get("active", ""))
    return written.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")


def is_overloaded(error: BaseException) -> bool:
    """Whether a server, or a proxy before it, answered that it cannot serve the request now."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in OVERLOADED


def not_answering(error: BaseException) -> UnavailableError | None:
    """Return what to tell people if Prefect's server did not answer, or was overloaded, when its client gave up; else
    None."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, httpx.TransportError) or is_overloaded(cause)):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    server = f"Prefect's server at {named_server()}"
    if isinstance(cause, httpx.HTTPStatusError):
        status = HTTPStatus(cause.response.status_code)
        return UnavailableError(
            f"{server} answers {status} {status.phrase}, also after several tries; give the same "
            "command again when it is less busy"
        )
    return UnavailableError(
        f"{server} does not answer ({cause}); start it with `prefect server start`, or set PREFECT_API_URL to one that "
        "runs. `cosmos-flows run` starts one of its own where none is named"
    )


def _wait_until_healthy(server: subprocess.Popen[bytes], url: str) -> None:
    end_s = time.monotonic() + STARTUP_S
    while time.monotonic() < end_s and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise UnavailableError(f"Prefect's server did not start in {STARTUP_S:g} s; set PREFECT_API_URL to one that runs")
