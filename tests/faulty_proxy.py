"""An HTTP proxy that fails as a test orders: what no real server does when it is asked to."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""


class FaultyProxy(ThreadingHTTPServer):
    """Passes every request on as it is, unless one of the next ones is to fail."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.target = urlsplit(target).netloc
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.reset()

    def reset(self) -> None:
        """Fail no more, and forget what was asked."""
        self.asked: list[str] = []
        """Methods of the requests so far."""
        self.faults: list[Callable[[Exchange], None]] = []
        """What happens to the next requests instead, one each."""
        self.always: Callable[[Exchange], None] = Exchange.pass_on
        """What happens to all others."""
        self.tunnels = True
        """Whether websockets are passed on; else refused."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that a fault has closed are no news."""


class Exchange(BaseHTTPRequestHandler):
    """One request and what becomes of it."""

    server: FaultyProxy  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append(self.command)
        if self.headers.get("Upgrade", "").lower() == "websocket":
            (Exchange.tunnel if self.server.tunnels else unavailable)(self)
            return
        fault = self.server.faults.pop(0) if self.server.faults else self.server.always
        fault(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

    def pass_on(self) -> None:
        """Do as asked."""
        self.reply(*self.ask())

    def ask(self, *without: str) -> Answer:
        """The target's answer to the request, some headers left out."""
        connection = HTTPConnection(self.server.target)
        headers = {name: value for name, value in self.headers.items() if name not in without}
        connection.request(self.command, self.path, self.body, headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, [h for h in answer.getheaders() if h[0].lower() != "transfer-encoding"], body

    def tunnel(self) -> None:
        """Pass bytes on in both directions until one side closes: those that are open never fail."""
        host, _, port = self.server.target.partition(":")
        with socket.create_connection((host, int(port))) as target:
            lines = [self.requestline, *(f"{name}: {value}" for name, value in self.headers.items()), "", ""]
            target.sendall("\r\n".join(lines).encode())
            back = threading.Thread(target=_pump, args=(target, self.connection), daemon=True)
            back.start()
            _pump(self.connection, target)
            back.join()
        self.close_connection = True

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Answer the request."""
        self.send_response_only(status)
        has_length = any(name.lower() == "content-length" for name, _ in headers)
        for name, value in headers if has_length else [*headers, ("Content-Length", str(len(body)))]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def faulty_proxy(target: str) -> Iterator[FaultyProxy]:
    """A proxy on a free port, in threads of this process."""
    with FaultyProxy(target) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def unavailable(request: Exchange) -> None:
    """503, as S3 asks to slow down."""
    body = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    request.reply(503, [("Content-Type", "application/xml")], body)


def cut(request: Exchange) -> None:
    """Half of the body, then the connection is closed."""
    status, headers, body = request.ask()
    request.reply(status, headers, body[: len(body) // 2])
    _close(request)


def lost(request: Exchange) -> None:
    """The target does as told, and its answer is lost."""
    request.ask()
    _close(request)


def silent(request: Exchange) -> None:
    """No answer; the connection stays open for a while."""
    threading.Event().wait(3)
    _close(request)


def unconditional(request: Exchange) -> None:
    """As a server that does not know conditional writes."""
    request.reply(*request.ask("If-None-Match"))


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def _close(request: Exchange) -> None:
    request.wfile.flush()
    request.connection.shutdown(socket.SHUT_RDWR)
    request.close_connection = True
