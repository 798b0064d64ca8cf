"""The running server: a socket, the application, signals, an orderly end."""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.reward_service.app import app_of
from cosmos_rl_core.reward_service.config import Config
from cosmos_rl_core.reward_service.service import Service
from cosmos_rl_core.reward_service.spool import Spool
from cosmos_rl_core.serving import connections

TRIED_PORTS = 100
"""Number of ports that are tried, beginning with the port in the settings."""
BACKLOG = 2048
GRACE_S = 5
"""Seconds that answers under way may still take when the server stops."""
SPARSE = ("asyncio", "uvicorn.error", connections.__name__, app_of.__module__)
"""Loggers of messages that clients can provoke. Each message is shown once a second at most."""
log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """A server that leaves signals to :func:`serve`, which lets running work end first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signal."""
        yield


def run(config: Config, said: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. ``said`` gets lines for people, the first with the URL.

    Raises :class:`ConfigError` if the folder or the ports are taken.
    """
    allow_files()
    with Spool(Path(config.settings.service.spool)) as spool, listening(config) as server:
        said(f"reward service at {url_of(server)}")
        for note in config.notes:
            said(f"note: {note}")
        asyncio.run(serve(config, spool, server))


async def serve(config: Config, spool: Spool, listening: socket.socket, stop: asyncio.Event | None = None) -> None:
    """Serve on a socket until ``stop`` is set, SIGTERM or Ctrl-C. Running work is then finished first."""
    stop = stop or asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    service = Service(config, spool)
    most = connections.most(config.settings.service.max_connections, len(service.pools))
    server = _Server(_settings(connections.bounded(app_of(service, spool.worker_token()), most - connections.SPARE)))
    service.start()
    # The server gets no socket: the door gives it connections.
    serving = asyncio.create_task(server.serve([]))
    taking = asyncio.create_task(connections.Door(listening, server, most).take())
    stopped = asyncio.create_task(stop.wait())
    with connections.logging_sparsely(*SPARSE):
        try:
            await asyncio.wait((serving, taking, stopped), return_when=asyncio.FIRST_COMPLETED)
            log.info("shutting down")
        finally:
            # Results can be fetched until the last one is there.
            await service.drain()
            server.should_exit = True
            stopped.cancel()
            taking.cancel()
            listening.close()
            await serving
            await service.close()
            with contextlib.suppress(asyncio.CancelledError):
                await taking


def _settings(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        # Another protocol on a connection would escape its limits.
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
    )


def allow_files() -> None:
    """Let this process open as many files as the system allows it: a body that arrives takes two."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listening(config: Config) -> socket.socket:
    """Return a listening socket at the first free port, beginning with the port in the settings.

    Raises :class:`ConfigError` if none is free.
    """
    host, first = config.settings.host, config.settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = "127.0.0.1" if host == "localhost" else host
    reason = ""
    for port in range(first, min(first + TRIED_PORTS, 2**16)) if first else (0,):
        # Only for sockets that name TCP does asyncio turn off Nagle's algorithm, which delays answers by 40 ms.
        server = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address, port))
            server.listen(BACKLOG)
        except OSError as error:
            server.close()
            reason = str(error)
            continue
        return server
    raise ConfigError(f"no port from {first} on can be listened at on {host}: {reason}")


def url_of(server: socket.socket) -> str:
    """Return the URL at which a socket listens."""
    host, port = server.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
