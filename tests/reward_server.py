"""A reward service for tests: cosmos-rl's protocol, every frame checked byte by byte, told how to behave.

Frames are taken apart by hand, without numpy's reader, so that what is sent is held against the format alone.
"""

import ast
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

TOKEN = "secret-of-the-tests"
REPLICA = "replica-7"

Answer = tuple[int, Any]
"""Status, and the JSON, or the :class:`Raw` bytes, that goes with it."""


@dataclass(frozen=True)
class Raw:
    """A reply as bytes, with headers of its own."""

    data: bytes
    headers: dict[str, str] = field(default_factory=dict[str, str])
    pause_s: float = 0.0
    """If there is one, bytes go out one by one, each after that many seconds."""


@dataclass(frozen=True)
class Frame:
    """A request, taken apart."""

    about: dict[str, Any]
    array: np.ndarray


def parse(body: bytes) -> Frame:
    """Raises ``ValueError`` unless the body is exactly a frame as cosmos-rl's client of diffusers models sends it."""
    line, newline, array = body.partition(b"\n")
    about = json.loads(line)
    if not newline or json.dumps(about).encode() != line:
        raise ValueError("the first line is not what json.dumps writes")
    media_type, shape = about["media_type"], _shape(array)
    more = [name for name in ("scorers", "metadata") if name in about]
    video = ["video_infos"] if media_type != "image" else []
    if list(about) != ["prompts", "reward_fn", *video, "media_type", *more]:
        raise ValueError(f"keys {list(about)}")
    rank, dtype, colours = {"image": (4, "|u1", -1), "video": (5, "|u1", 1), "latent": (5, "<f2", 1)}[media_type]
    if len(shape) != rank or len(about["prompts"]) != shape[0]:
        raise ValueError(f"{media_type} of shape {shape} with {len(about['prompts'])} prompts")
    if shape[colours] != (16 if media_type == "latent" else 3):
        raise ValueError(f"{media_type} of shape {shape}")
    if media_type != "image" and [*map(list, about["video_infos"])] != [["video_fps"]] * shape[0]:
        raise ValueError(f"video_infos {about['video_infos']}")
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header + " " * (-(10 + len(header) + 1) % 64) + "\n"
    expected = b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded.encode()
    data = array[len(expected) :]
    if array[: len(expected)] != expected or len(data) != math.prod(shape) * int(dtype[-1]):
        raise ValueError(f"array header {array[:128]!r} with {len(data)} bytes, expected {expected!r}")
    return Frame(about, np.frombuffer(data, dtype).reshape(shape))


def _shape(array: bytes) -> tuple[int, ...]:
    return ast.literal_eval(array[10 : array.index(b"\n")].decode())["shape"]


def brightness(frame: Frame) -> dict[str, list[Any]]:
    """Return the mean of each sample that was sent, and the length of its prompt."""
    means = [float(np.mean(entry, dtype=np.float64)) for entry in frame.array]
    return {"overall_reward": means, "prompt_length": [float(len(text)) for text in frame.about["prompts"]]}


@dataclass
class RewardServer:
    """What the service does, and the requests that it got."""

    enqueue_url: str = ""
    fetch_url: str = ""
    token: str = TOKEN
    """What requests have to carry; without one they must have no ``Authorization`` at all."""
    replica: Any = REPLICA
    """What the service calls itself; None where it does not."""
    scores: Callable[[Frame], dict[str, Any] | None] = brightness
    """Scores of a frame by name; None is a reward that failed without a word, so that nothing is ever there."""
    enqueue_answers: list[Answer] = field(default_factory=list[Answer])
    """Given instead, first come, first served."""
    pull_answers: list[Answer] = field(default_factory=list[Answer])
    pulls_before_ready: int = 0
    """How often a request is asked for in vain."""
    scorer: dict[str, Any] | None = None
    """Version and digest of what scores, and whether it takes metadata, if the service tells it."""
    lost: set[str] = field(default_factory=set[str])
    """Requests that were accepted and are no longer known."""
    frames: list[Frame] = field(default_factory=list[Frame])
    mistakes: list[str] = field(default_factory=list[str])
    """What was wrong with requests; empty where all were as they should be."""
    pulls: dict[str, int] = field(default_factory=dict[str, int])
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while a request is taken or answered."""

    @property
    def sorted_frames(self) -> list[Frame]:
        """The frames by prompts and pixels: requests that are under way together arrive in any order."""
        return sorted(self.frames, key=lambda frame: (frame.about["prompts"], frame.array.tobytes()))

    def environment(self) -> dict[str, str]:
        """What a client has to be told."""
        return {
            "REMOTE_REWARD_ENQUEUE_URL": self.enqueue_url,
            "REMOTE_REWARD_FETCH_URL": self.fetch_url,
            "REMOTE_REWARD_TOKEN": self.token,
        }

    def enqueue(self, headers: dict[str, str], body: bytes) -> Answer:
        self._require(headers, "authorization", f"Bearer {self.token}" if self.token else None)
        self._require(headers, "content-type", "application/octet-stream")
        if self.enqueue_answers:
            return self.enqueue_answers.pop(0)
        try:
            frame = parse(body)
            (name,) = frame.about["reward_fn"]
            if (wanted := frame.about.get("scorers")) and wanted != {name: (self.scorer or {}).get("digest")}:
                return 409, {"detail": "another scorer", "scorer": {"name": name, **(self.scorer or {})}}
            self.frames.append(frame)
        except (ValueError, KeyError, IndexError, SyntaxError) as error:
            self.mistakes.append(f"frame: {error}")
            return 400, {"detail": f"bad frame: {error}"}
        named = {} if self.replica is None else {"replica_id": self.replica}
        return 200, {"uuid": f"uuid-{len(self.frames) - 1}", **named}

    def pull(self, headers: dict[str, str], body: bytes) -> Answer:
        self._require(headers, "authorization", f"Bearer {self.token}" if self.token else None)
        self._require(headers, "content-type", "application/x-www-form-urlencoded")
        (uuid,), (name,) = (parse_qs(body.decode())[key] for key in ("uuid", "type"))
        known = uuid.startswith("uuid-")
        self._require(headers, "x-lepton-replica-target", self.replica if known else None)
        self.pulls[uuid] = self.pulls.get(uuid, 0) + 1
        if self.pull_answers:
            return self.pull_answers.pop(0)
        if uuid in self.lost:
            return 404, {"message": f"unknown request {uuid}"}
        if not known:
            return 400, {"message": f"Not found scores for {uuid}"}
        frame = self.frames[int(uuid.removeprefix("uuid-"))]
        scores = self.scores(frame) if frame.about["reward_fn"] == {name: 1.0} else None
        if scores is None or self.pulls[uuid] <= self.pulls_before_ready:
            return 400, {"message": f"Not found scores for {uuid}"}
        told = {"scores": scores, "duration": "0.35", "decoded_duration": "N/A", "type": name}
        return 200, told | ({"scorer": {"name": name, **self.scorer}} if self.scorer else {})

    def info(self, names: list[str]) -> dict[str, Any]:
        """What it tells of itself."""
        return {"format": 1, "scorers": {name: {"plugin": "x", **(self.scorer or {})} for name in names}}

    def _require(self, headers: dict[str, str], name: str, expected: str | None) -> None:
        if headers.get(name) != expected:
            self.mistakes.append(f"{name}: {headers.get(name)!r}, expected {expected!r}")


class Withholding:
    """Scores that are withheld until the service has as many requests as it may, or all that are left.

    A request of several samples is refused, and each of them is then left.
    """

    def __init__(self, server: RewardServer, requests: int, in_flight: int) -> None:
        self._server, self._left, self._in_flight = server, requests, in_flight
        self.answered, self.most = 0, 0

    def __call__(self, frame: Frame) -> dict[str, list[float]] | None:
        unanswered = len(self._server.frames) - self.answered
        self.most = max(self.most, unanswered)
        if unanswered < min(self._in_flight, self._left - self.answered):
            return None
        self.answered += 1
        if len(frame.array) == 1:
            return {"overall_reward": [float(frame.array[0, 0, 0, 0])]}
        self._left += len(frame.array)
        return {"overall_reward": []}


@contextmanager
def reward_server() -> Iterator[RewardServer]:
    """A running service on a free port of this machine."""
    service = RewardServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(size := int(self.headers["Content-Length"]))
            if len(body) < size:  # a client may hang up in the middle of a frame
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            known = {"/api/reward/enqueue": service.enqueue, "/api/reward/pull": service.pull}
            with service.turn:
                status, told = known[self.path](headers, body) if self.path in known else (404, {"detail": "Not Found"})
            # NaN goes out as Python's NaN, as from cosmos-rl's service.
            raw = told if isinstance(told, Raw) else Raw(json.dumps(told).encode())
            self.send_response(status)
            for header, value in raw.headers.items():
                self.send_header(header, value)
            self.send_header("Content-Length", str(len(raw.data)))
            self.end_headers()
            with suppress(ConnectionError):  # a client may hang up in the middle of a reply
                for part in [bytes([byte]) for byte in raw.data] if raw.pause_s else [raw.data]:
                    time.sleep(raw.pause_s)
                    self.wfile.write(part)

        def do_GET(self) -> None:
            tells = service.scorer is not None and self.path == "/api/reward/info"
            data = json.dumps(service.info(["fn", "dance_grpo"])).encode() if tells else b""
            self.send_response(200 if tells else 405)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    root = f"http://127.0.0.1:{server.server_port}/api/reward"
    service.enqueue_url, service.fetch_url = f"{root}/enqueue", f"{root}/pull"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def used_reward_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    """A server that the environment names, and that no request may puzzle."""
    with reward_server() as service:
        for name, value in service.environment().items():
            monkeypatch.setenv(name, value)
        yield service
        assert service.mistakes == []
