"""Connections of a server, with limits on their number and on the time that each may wait: none keeps others out."""

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cosmos_rl_core.errors import ConfigError

HEADERS_S = 20.0
"""Seconds within which a client must send all headers of a request, and have read the answer before it."""
READ_S = 60.0
"""Seconds within which a client must take a part of an answer that is too long to be sent at once."""
SPARE = 8
"""Number of connections that no request at work may use, so that a new client can always send its request."""
OTHER_FILES = 64
"""Number of files that a service has open without a request."""
FILES_EACH = 2
"""Number of open files of a request at work: its connection and its body."""
ALWAYS = ("/healthz",)
"""Paths that are answered however many requests are at work."""
log = logging.getLogger(__name__)


def most(wanted: int, processes: int) -> int:
    """Return the number of connections for which this process may open files, at most ``wanted``.

    Raises :class:`ConfigError` if there are too few.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A process that scores has pipes and a log.
    found = (files - OTHER_FILES - 4 * processes) // FILES_EACH
    if found < 2 * SPARE:
        expected = OTHER_FILES + 4 * processes + 2 * SPARE * FILES_EACH
        raise ConfigError(f"this process may open {files} files; expected at least {expected} (ulimit -n)")
    return min(found, wanted)


class Connection(H11Protocol):
    """A connection that is closed when its client keeps it waiting.

    Uvicorn has no timeout for the headers of a request, and none for an answer that the client does not read.
    """

    def __init__(self, door: "Door", server: uvicorn.Server) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._door = door
        self._headers_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Begin to wait for the headers of a request."""
        super().connection_made(transport)
        self._follow()

    def data_received(self, data: bytes) -> None:
        """Take bytes, which may complete the headers of a request."""
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting: cancel both timers."""
        self._leave()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_S, self._late, "took no part of an answer", READ_S)

    def resume_writing(self) -> None:
        """Stop waiting for the client to read."""
        super().resume_writing()
        self._read_timer = _cancelled(self._read_timer)

    def end(self) -> None:
        """Close without an answer."""
        self._leave()
        self.transport.abort()

    def _follow(self) -> None:
        """Count this connection as waiting, with a time limit for the next request's headers, unless one is at work."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._door.waiting.pop(self, None)
            self._headers_timer = _cancelled(self._headers_timer)
        elif self not in self._door.waiting:
            self._door.waiting[self] = None
            self._headers_timer = self.loop.call_later(HEADERS_S, self._late, "sent no whole headers", HEADERS_S)

    def _leave(self) -> None:
        self._door.waiting.pop(self, None)
        self._headers_timer, self._read_timer = _cancelled(self._headers_timer), _cancelled(self._read_timer)

    def _late(self, found: str, seconds: float) -> None:
        log.warning("a client %s within %g s; its connection is closed", found, seconds)
        self.end()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class Door:
    """Takes connections at a socket, at most ``most`` at once: the one that waits longest makes room for a new one.

    It accepts connections itself, because asyncio's server of Python 3.11 logs thousands of lines a second when no more
    files can be opened.
    """

    def __init__(self, listening: socket.socket, server: uvicorn.Server, most: int) -> None:
        self._listening, self._server, self._most = listening, server, most
        self.waiting: dict[Connection, None] = {}
        """Connections without a request at work; the connection that waits longest comes first."""

    async def take(self) -> None:
        """Take connections for ever, once the server has started."""
        while not self._server.started:
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        self._listening.setblocking(False)
        while True:
            try:
                opened, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                log.warning("no connection can be taken: %s", error)
                await asyncio.sleep(1.0)
                continue
            await self._make_room()
            await loop.connect_accepted_socket(lambda: Connection(self, self._server), opened)

    async def _make_room(self) -> None:
        while len(self._server.server_state.connections) >= self._most:
            if oldest := next(iter(self.waiting), None):
                log.warning(
                    "a client without a whole request made room for another one; at most %d at once", self._most
                )
                oldest.end()
            await asyncio.sleep(0.001)


def bounded(app: ASGIApp, most: int) -> ASGIApp:
    """Return an application that has at most ``most`` requests at work and answers further ones 503."""
    running = 0

    async def within(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running
        if running >= most and scope["path"] not in ALWAYS:
            told = {"detail": f"{most} requests are at work, the most at once; send the request again later"}
            await JSONResponse(told, 503, {"Retry-After": "5"})(scope, receive, send)
            return
        running += 1
        try:
            await app(scope, receive, send)
        finally:
            running -= 1

    return within


class _OnceASecond(logging.Filter):
    """Lets a message through once a second, with the number of messages that were left out before it."""

    def __init__(self) -> None:
        super().__init__()
        self._told_s, self._left_out = dict[str, float](), Counter[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        message, now_s = str(record.msg), time.monotonic()
        if now_s - self._told_s.get(message, -1.0) < 1.0:
            self._left_out[message] += 1
            return False
        self._told_s[message] = now_s
        if left_out := self._left_out.pop(message, 0):
            record.msg = f"{message} ({left_out} times more before)"
        return True


@contextlib.contextmanager
def logging_sparsely(*names: str) -> Iterator[None]:
    """Let loggers repeat a message once a second at most: what clients provoke must not fill the disk."""
    sparse, loggers = _OnceASecond(), [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(sparse)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(sparse)
