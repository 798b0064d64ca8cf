"""A server of files on 127.0.0.1 with ETags and ranges, which can be told to fail."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FileServer(ThreadingHTTPServer):
    """Files by path, and what goes wrong with the next requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.statuses: list[int] = []
        """Answers to the next requests, instead of the file."""
        self.cuts: list[int] = []
        """Bytes after which the next transfers break off."""
        self.tagged, self.ranges = True, True
        self.asked: list[tuple[str, str, str]] = []
        """Method, path and range of each request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        server, path = self.server, self.path.partition("?")[0]
        wanted = self.headers.get("Range", "")
        server.asked.append((self.command, path, wanted))
        status = server.statuses.pop(0) if server.statuses else 200 if path in server.files else 404
        data = server.files.get(path, b"") if status == 200 else b""
        tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        place = 0
        if wanted and server.ranges and status == 200 and self.headers.get("If-Range", tag) == tag:
            place, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) - place))
        if status == 206:
            self.send_header("Content-Range", f"bytes {place}-{len(data) - 1}/{len(data)}")
        if server.tagged:
            self.send_header("ETag", tag)
        self.end_headers()
        if not body:
            return
        data = data[place:]
        if server.cuts and data:
            self.wfile.write(data[: server.cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def serving() -> Iterator[FileServer]:
    """A server for as long as the context lasts."""
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
