"""A client as the protocol's page describes cosmos-rl's: the standard library and numpy, nothing of ours."""

import io
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def frame(prompts: Sequence[str], reward_fn: dict[str, float], array: np.ndarray, **more: Any) -> bytes:
    """A body: keys in the order of cosmos-rl's client of diffusers models."""
    media_type = more.pop("media_type", None)
    last = {"media_type": media_type} if media_type else {}
    about = {"prompts": list(prompts), "reward_fn": reward_fn, **more, **last}
    data = io.BytesIO()
    np.save(data, array)
    return json.dumps(about).encode() + b"\n" + data.getvalue()


@dataclass(frozen=True)
class UpstreamClient:
    """Posts, and takes every answer but 200 for "not yet"."""

    url: str
    token: str = ""

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and JSON of one request."""
        whole = {"Authorization": f"Bearer {self.token}"} | (headers or {})
        request = urllib.request.Request(f"{self.url}/api/reward/{path}", body, whole, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                text = error.read()
            return error.code, json.loads(text) if text else None

    def form(self, path: str, **fields: str) -> tuple[int, Any]:
        """Status and JSON of a form."""
        return self.post(path, urllib.parse.urlencode(fields).encode())

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body of a page."""
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": f"Bearer {self.token}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read()
        return status, json.loads(text) if text.startswith(b"{") else text.decode()

    def enqueue(self, body: bytes) -> str:
        status, told = self.post("enqueue", body, {"Content-Type": "application/octet-stream"})
        assert status == 200, (status, told)
        return told["uuid"]

    def result(self, uuid: str, kind: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """Poll until there is a result."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            status, told = self.form("pull", uuid=uuid, type=kind)
            if status == 200:
                return told
            assert (status, told) == (400, {"message": f"Not found scores for {uuid}"})
            time.sleep(0.02)
        raise TimeoutError(f"no result of {uuid} within {timeout_s} s")

    def scores(self, body: bytes, kind: str) -> dict[str, Any]:
        """The result of a frame."""
        return self.result(self.enqueue(body), kind)
