"""A Prefect server for one command, if none is configured. It ends with the command, even if that is killed."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import httpx

from cosmos_rl_core.config import toml
from cosmos_rl_core.errors import ConfigError, CosmosRLError, NoSpaceError, UnavailableError
from cosmos_rl_core.processes import PARENT
from flows.devices.work_folders import is_full

OWN = "COSMOS_FLOWS_OWN_SERVER"
"""Environment variable that is set while :func:`prefect_server` runs its own server."""
OVERLOADED = {429, 500, 502, 503, 504}
"""HTTP statuses: too many requests, internal error, bad gateway, service unavailable, gateway timeout."""
UVICORN = "-m uvicorn --factory prefect.server.api.server:create_app --log-level error --fd"
ROOM = 2**20
"""Bytes that a disk must have left: about the first growth of the database."""
STARTUP_S = 120.0
"""Wait for the server in seconds: its first start on a machine creates the database."""

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # The automation of `cosmos-flows infra init` needs heartbeats. deployments/prefect.yaml sets the same.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Retries of a request, about a minute in all, which is longer than a restart of the server.
    "PREFECT_CLIENT_MAX_RETRIES": "6",
    # The console shows only the lines of this project; Prefect's own are in its UI.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
}
"""Default settings of Prefect for one command; the environment overrides them."""


@contextmanager
def prefect_server() -> Iterator[None]:
    """Start a server on 127.0.0.1 and set ``PREFECT_API_URL`` to it, unless a server is named.

    Must be entered before Prefect is imported. Prefect's own temporary server is stopped by an exit handler, which a
    killed process does not run. Raises :class:`UnavailableError` or :class:`NoSpaceError` if the server does not start,
    or does not answer later.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if named_server() is not None:
        yield
        return
    print(
        "starting a Prefect server for this command, at the first time for half a minute", file=sys.stderr, flush=True
    )
    # The server gets an open socket: nobody else can take the port, and requests wait until the server is ready.
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # Connections inherit it. Uvicorn takes the socket for a Unix one and does not set it; answers take 40 ms then.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        uvicorn = [sys.executable, *UVICORN.split(), str(listening.fileno())]
        server = subprocess.Popen(
            [sys.executable, "-m", "cosmos_rl_core.processes", *uvicorn],
            env=os.environ | {PARENT: str(os.getpid())},
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C reaches the whole process group, but the flow still has to report its end to this server.
            start_new_session=True,
        )
    try:
        with _reached_directly():
            _require_healthy(url)
            # A thread sends log lines late, possibly after this server has ended.
            os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")
            os.environ |= {"PREFECT_API_URL": url, OWN: "1"}
            try:
                yield
            except Exception as error:
                # Here, because only here the server is known.
                if not isinstance(error, CosmosRLError) and (known := not_answering(error)) is not None:
                    raise known from error
                raise
    finally:
        for name in ("PREFECT_API_URL", OWN):
            os.environ.pop(name, None)
        server.terminate()
        server.wait()


@contextmanager
def _reached_directly() -> Iterator[None]:
    """Let requests to 127.0.0.1 pass by the proxies that the environment names: a proxy would ask its own machine."""
    before = os.environ.get("no_proxy")
    named = before or os.environ.get("NO_PROXY", "")
    if named != "*":
        os.environ["no_proxy"] = f"{named},127.0.0.1".lstrip(",")
    try:
        yield
    finally:
        os.environ.pop("no_proxy", None)
        if before is not None:
            os.environ["no_proxy"] = before


def server_is_own() -> bool:
    """Return whether this command runs its own server."""
    return OWN in os.environ


def named_server() -> str | None:
    """Return the URL of the server in the environment or in Prefect's active profile, None if there is none.

    Raises :class:`ConfigError` if the file of the profiles cannot be read.
    """
    if "PREFECT_API_URL" in os.environ:
        return os.environ["PREFECT_API_URL"]
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml"))
    if not path.is_file():
        return None
    try:
        written = toml.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}, the profiles of Prefect, cannot be read: {error}; {_MEND_PROFILES}") from error
    active, profiles = os.environ.get("PREFECT_PROFILE", written.get("active", "")), written.get("profiles", {})
    if not isinstance(active, str):
        raise ConfigError(f"{path}: active is {active!r}, expected the name of a profile; {_MEND_PROFILES}")
    profile = profiles.get(active, {}) if isinstance(profiles, dict) else None
    if not isinstance(profile, dict):
        # The message does not quote the file, because profiles hold keys.
        raise ConfigError(f"{path}: expected a table of profiles with a table {active!r}; {_MEND_PROFILES}")
    return profile.get("PREFECT_API_URL")


_MEND_PROFILES = "mend it, or name another file with PREFECT_PROFILES_PATH"


def is_overloaded(error: BaseException) -> bool:
    """Return whether a server, or a proxy in front of it, answered that it cannot serve the request now."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in OVERLOADED


def not_answering(error: BaseException) -> UnavailableError | None:
    """Return an error with advice if Prefect's server did not answer or was overloaded; else None."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, httpx.TransportError) or is_overloaded(cause)):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if server_is_own() and (full := _full_disk("Prefect's server failed")) is not None:
        return full
    server = f"Prefect's server at {named_server()}"
    if isinstance(cause, httpx.HTTPStatusError):
        status = HTTPStatus(cause.response.status_code)
        return UnavailableError(
            f"{server} answers {status} {status.phrase}, also after several retries; run the same "
            "command again when it is less busy"
        )
    return UnavailableError(
        f"{server} does not answer ({cause}); start it with `prefect server start`, or set PREFECT_API_URL to another "
        "server. If none is named, `cosmos-flows run` starts its own"
    )


def _require_healthy(url: str) -> None:
    try:
        httpx.get(f"{url}/health", timeout=STARTUP_S).raise_for_status()
    except httpx.HTTPError as error:
        why = f"Prefect's server did not start ({error})"
        more = "set PREFECT_API_URL to a running one"
        raise (_full_disk(why) or UnavailableError(f"{why}; {more}")) from error


def _full_disk(what: str) -> NoSpaceError | None:
    """Return an error that names a full disk of the command's own server; None if all have room.

    The disks hold its database and SQLite's temporary files. The output of the server is not kept.
    """
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    for folder in (home, Path(os.environ.get("TMPDIR", "/tmp"))):
        if is_full(folder, ROOM):
            return NoSpaceError(
                f"{what}: no space left in {folder}; free some, or set PREFECT_HOME and TMPDIR to folders with room, "
                "or PREFECT_API_URL to a running server; then run again"
            )
    return None
