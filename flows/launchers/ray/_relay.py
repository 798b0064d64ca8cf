"""The socket at which workers on a node ask for units of an elastic stage. The bridge passes on what they say."""

import selectors
import socket
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from stages.execution.handing import address_in

WAIT_S = 1.0
"""Longest wait for a connection or for what a worker says, in seconds."""


class Relay:
    """The socket and its connections. Each connection has one reader and one writer."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="cosmos-units-")
        self.folder = Path(self._folder.name)
        self._listener = socket.socket(socket.AF_UNIX)
        with address_in(self.folder) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._connected: list[socket.socket] = []

    def accept(self) -> int | None:
        """Return the number of a new connection; None if there is none for a moment."""
        if not _speaks(self._listener):
            return None
        with suppress(OSError):
            connected, _ = self._listener.accept()
            self._connected.append(connected)
            return len(self._connected) - 1
        return None

    def receive(self, number: int) -> bytes | None:
        """Return bytes from a connection: ``b""`` if none come for a moment, None at its end."""
        if not _speaks(self._connected[number]):
            return b""
        with suppress(OSError):
            return self._connected[number].recv(65536) or None
        return None

    def send(self, number: int, data: bytes) -> None:
        """Send bytes to a connection; no bytes end it. A connection that has ended gets nothing."""
        with suppress(OSError):
            if data:
                self._connected[number].sendall(data)
            else:
                self._connected[number].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections."""
        for one in (self._listener, *self._connected):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._folder.cleanup()


def _speaks(one: socket.socket) -> bool:
    """Return whether there is something to read, or to accept, within a moment."""
    if one.fileno() < 0:
        return True
    with selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ)
        return bool(selector.select(WAIT_S))
