"""A service that looks at pictures, for tests: OpenAI's ``/v1/chat/completions``, with each request checked."""

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

TOKEN = "secret-of-the-tests"


@dataclass(frozen=True)
class Asked:
    """A request, taken apart."""

    model: str
    instruction: str
    settings: dict[str, Any]
    pictures: list[Image.Image]


@dataclass(frozen=True)
class Reply:
    """What the service answers."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    hangs: bool = False
    """Whether it sends its headers and nothing more until the server ends."""


def completion(text: str | None, end: str = "stop", **message: Any) -> Reply:
    """A completion with a text."""
    return Reply(
        body={"choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": end}]}
    )


def size_of_pictures(asked: Asked) -> Reply:
    """A caption that says what was sent."""
    width, height = asked.pictures[0].size
    return completion(f" {len(asked.pictures)} of {height} x {width} \n")


@dataclass
class CaptionServer:
    """What the service does, and the requests that it got."""

    url: str = ""
    token: str = ""
    replies: list[Reply] = field(default_factory=list[Reply])
    """Given first, first come, first served."""
    caption: Callable[[Asked], Reply] = size_of_pictures
    """Given then."""
    asked: list[Asked] = field(default_factory=list[Asked])
    most_at_once: int = 0
    mistakes: list[str] = field(default_factory=list[str])
    """What was wrong with requests."""
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    now: int = 0

    def answer(self, path: str, authorization: str | None, body: bytes) -> Reply:
        if path != "/v1/chat/completions" or authorization != (f"Bearer {self.token}" if self.token else None):
            self.mistakes.append(f"{path} {authorization}")
        asked = parse(body)
        with self.lock:
            self.asked.append(asked)
            if self.replies:
                return self.replies.pop(0)
        return self.caption(asked)


def parse(body: bytes) -> Asked:
    """Raises ``KeyError`` or ``ValueError`` unless the body is a request for a chat about pictures."""
    request = json.loads(body)
    (message,) = request.pop("messages")
    if message["role"] != "user":
        raise ValueError(message["role"])
    (text,) = (part for part in message["content"] if part["type"] == "text")
    pictures: list[Image.Image] = []
    for part in message["content"]:
        if part is text:
            continue
        start, _, data = part["image_url"]["url"].partition(",")
        picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        if (part["type"], start) != ("image_url", f"data:image/{(picture.format or '').lower()};base64"):
            raise ValueError(f"{part['type']} {start} {picture.format}")
        picture.load()
        pictures.append(picture)
    return Asked(request.pop("model"), text["text"], request, pictures)


@contextmanager
def serving(port: int = 0, **settings: Any) -> Iterator[CaptionServer]:
    """A service on this machine, until the block ends."""
    told = CaptionServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with told.lock:
                told.now += 1
                told.most_at_once = max(told.most_at_once, told.now)
            body = self.rfile.read(int(self.headers["Content-Length"]))
            reply = told.answer(self.path, self.headers.get("Authorization"), body)
            data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            with told.lock:
                told.now -= 1
            with suppress(ConnectionError):
                if reply.status == 0:
                    self.connection.close()
                    return
                self.send_response(reply.status)
                for name, value in (reply.headers | {"Content-Length": str(len(data))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if reply.hangs:
                    told.ended.wait()
                    return
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    told.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield told
    finally:
        told.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
