"""Parts of what a GPU must show, and the JSON that they add up to. Imports nothing but the standard library.

A part runs in a worker process, and each row that it measures is written at once. So a lane that is killed, or whose
time is over, goes on with the parts that are missing.
"""

import datetime
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["done", "failed", "too long"]
SHAPES = ("sd3_5_medium", "wan_1_3b", "sana_1_6b", "cosmos_predict2_5_2b")
SLACK = 3.0
"""Factor on its estimate after which a part is ended."""
LEAST_S = 60.0
"""Seconds that a part has at least before it is ended, if the lane has them."""
LOG_TAIL = 4000
"""Last characters of the log that the result of a failed part shows."""
PARENT = "COSMOS_RL_PARENT_PID"
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Read when cuBLAS is first used, which may be before a stage sets it."""


@dataclass(frozen=True)
class Part:
    """Some of the work, by the function that yields its rows."""

    name: str
    work: str
    """Module below ``tests.gpu``, and its function."""
    estimate_s: float
    """No part begins that would need more seconds than are left. On an H200 ``machine`` took 25, and tests 60 to 90.
    The others had not ended after half of these, and are guesses."""
    options: tuple[str, ...] = ()
    on_device: bool = True
    """Whether it needs a device; others run anywhere, also ahead."""


def _parts() -> tuple[Part, ...]:
    counted = [Part(f"counts {shape}", "counts.rows", 60, (shape,), on_device=False) for shape in SHAPES]
    shapes = [Part(f"shape {shape}", "shapes.rows", 150, (shape,)) for shape in SHAPES]
    tests = [Part(f"tests {name}", "chunks.rows", 90, (name,)) for name in ("stages", "parts", "models", "training")]
    return (
        *counted,
        Part("counts qwen3_vl_2b", "vlm.counts", 30, on_device=False),
        Part("machine", "machine.rows", 20),
        Part("bits", "bits.rows", 150),
        *shapes[:2],
        Part("shape qwen3_vl_2b", "vlm.rows", 45),
        *shapes[2:],
        Part("iteration", "loops.rows", 300),
        *tests,
        Part("tests compiled", "chunks.rows", 120, ("compiled",)),
        *(Part(f"compiled {shape}", "shapes.rows", 240, (shape, "compiled")) for shape in SHAPES[:2]),
    )


PARTS = _parts()
"""In the order of their worth, after what can be counted ahead."""


class Results:
    """The file of results, which is whole at every moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, dict[str, Any]] = {}
        """What is known of each part that began, by name."""
        if path.exists():
            self.parts = json.loads(path.read_text(encoding="utf-8"))["parts"]

    def outcome(self, part: Part) -> Outcome | None:
        """Return how a part ended; None if it has not."""
        return self.parts.get(part.name, {}).get("outcome")

    def put(self, part: Part, found: dict[str, Any]) -> None:
        """Write what is known of a part now."""
        self.parts[part.name] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".new")
        with aside.open("w", encoding="utf-8") as file:
            json.dump({"parts": self.parts}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return all rows by part."""
        return {name: found["rows"] for name, found in self.parts.items()}


class Worker:
    """A process that does one part after the other. It is started when it is needed, and ends with this one."""

    def __init__(self, words: Sequence[str], log: Path, paths: Sequence[Path] = ()) -> None:
        """Take the folders that its processes import from before others."""
        self._words, self.log, self._paths = words, log, [str(path) for path in paths]
        self._process: subprocess.Popen[bytes] | None = None
        self._replies, self._read = -1, b""

    def do(self, order: dict[str, Any], seconds: float, row: Callable[[dict[str, Any]], None]) -> tuple[Outcome, str]:
        """Let it do a part, call ``row`` with each row, and return how that ended, with its last words if badly."""
        process, deadline_s = self._started(), time.monotonic() + seconds
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        while True:
            line = self._line(deadline_s)
            if line is None or not line:
                self.end()
                return ("too long" if line is None else "failed"), self._last_words()
            said = json.loads(line)
            if "row" in said:
                row(said["row"])
            elif said["error"]:
                # What a failure leaves in the process, such as a broken device, must not fail the next part.
                self.end()
                return "failed", said["error"]
            else:
                return "done", ""

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._replies, replies = os.pipe()
            self._read = b""
            self.log.parent.mkdir(parents=True, exist_ok=True)
            paths = [*self._paths, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {PARENT: str(os.getpid()), "PYTHONPATH": os.pathsep.join(paths)}
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self._words, str(replies)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=(replies,),
                    start_new_session=True,
                    env=os.environ | environment | REPEATABLE,
                )
            os.close(replies)
        return self._process

    def _line(self, deadline_s: float) -> bytes | None:
        """Return its next line, empty if it has ended, None if the time is over."""
        while b"\n" not in self._read:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._replies], [], [], left_s)[0]:
                return None
            if not (some := os.read(self._replies, 65536)):
                return b""
            self._read += some
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _last_words(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]

    def end(self) -> None:
        """End it, with what it started in its group."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        os.close(self._replies)
        self._process = None


def chosen(results: Results, names: Sequence[str], *, on_device: bool) -> list[Part]:
    """Return the parts that are to be done: those that have not begun, then those that ended badly."""
    asked = [part for part in PARTS if not names or any(part.name.startswith(name) for name in names)]
    open_parts = [part for part in asked if results.outcome(part) != "done" and (on_device or not part.on_device)]
    return sorted(open_parts, key=lambda part: results.outcome(part) is not None)


def run(results: Results, parts: Sequence[Part], worker: Worker, seconds: float, *, tiny: bool) -> list[Part]:
    """Do parts until the time is over, and return those that did not fit."""
    deadline_s, too_long = time.monotonic() + seconds, list[Part]()
    try:
        for part in parts:
            left_s = deadline_s - time.monotonic()
            if part.estimate_s * (0.1 if tiny else 1.0) > left_s:
                too_long.append(part)
                continue
            _do(results, part, worker, min(left_s, max(LEAST_S, SLACK * part.estimate_s)), tiny=tiny)
    finally:
        worker.end()
    return too_long


def _do(results: Results, part: Part, worker: Worker, seconds: float, *, tiny: bool) -> None:
    began_s, rows = time.monotonic(), list[dict[str, Any]]()
    known = results.rows()

    def take(row: dict[str, Any]) -> None:
        rows.append(row)
        results.put(part, {"outcome": None, "rows": rows})
        print(f"  {json.dumps(row)}", flush=True)

    print(f"{part.name}, about {part.estimate_s:.0f} s", flush=True)
    order = {"work": part.work, "options": part.options, "tiny": tiny, "known": known}
    outcome, said = worker.do(order, seconds, take)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    found = {"outcome": outcome, "date": date, "seconds": round(time.monotonic() - began_s, 1), "rows": rows}
    results.put(part, found | ({"said": said[-LOG_TAIL:]} if said else {}))
    print(f"{part.name}: {outcome} after {found['seconds']} s", flush=True)
    if said:
        print(said[-LOG_TAIL:], file=sys.stderr, flush=True)
