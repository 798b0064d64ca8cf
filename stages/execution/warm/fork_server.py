"""A fork server for stages on the CPU: ``python -m stages.execution.warm.fork_server``.

The server imports everything once, then forks a runner for each request; for several ranks, a parent that forks them.
It imports torch before the first stage that may use it: a run that only indexes, scores or reports never does. It reads
and writes JSON lines.
In: ``{"stage": name, "request": path, "log": path, "ranks": n}``.
Out: ``{"pid": n}`` at once, ``{"pid": n, "returncode": c}`` at the end.
It computes nothing itself, so it has no thread pool and no CUDA context that a fork could break.

Many libraries import their submodules on first use. Each fork therefore reports its imports, and the server imports the
same modules before the next fork. It also loads the models and scorers that a fork loaded, up to :data:`READY_BYTES`.
"""

import gc
import importlib
import json
import os
import selectors
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TextIO

from cosmos_rl_core import numerics, plugins
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.imports import Load, is_ready, loads, make_ready, uncollected, without_torchvision_warnings
from cosmos_rl_core.processes import die_with_parent
from stages.execution import runner
from stages.execution.outcome import failure_of
from stages.execution.warm.forked_ranks import lead
from stages.registry import STAGES, module_of

LIGHT = (
    "onnxruntime",
    "pandas",
    "pyarrow.parquet",
    "rapidocr",
    *(module_of(name) for name, stage in STAGES.items() if not stage.torch),
)
"""Modules that are imported before the first fork."""
TORCH = (
    "diffusers",
    "peft",
    "torch",
    "transformers",
    *(module_of(name) for name, stage in STAGES.items() if stage.torch),
)
"""Modules that are imported before the first fork of a stage that may import torch."""

REAP_INTERVAL_S = 0.005
READY_BYTES = 2**30
"""Most bytes of loaded models and scorers, so that the server of a large model does not hold it all the time."""
_READY_BYTES: list[int] = []
"""Bytes of each model and scorer that is loaded."""
MEETING_FILE = "meeting"
"""File next to a request at which its ranks join their process group."""


def main() -> None:
    """Serve until standard input closes."""
    die_with_parent()
    without_torchvision_warnings()
    # Standard output is for replies alone. What libraries print, some when they are imported, goes to standard error.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Unbuffered, so that select sees everything that was written.
    requests = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    _remember_packages()
    _preload(LIGHT)
    _reply(replies, {"ready": os.getpid()})
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    reports: dict[int, IO[bytes]] = {}
    while True:
        if selector.select(REAP_INTERVAL_S if reports else None):
            line = requests.readline()
            if not line:
                return
            order = json.loads(line)
            if STAGES[order["stage"]].torch:
                _preload_torch()
            _fork(order, replies, reports)
        for pid in list(reports):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                # Reply first, so that the launcher does not wait for the imports.
                _reply(replies, {"pid": pid, "returncode": os.waitstatus_to_exitcode(status)})
                with reports.pop(pid) as report:
                    _repeat(report)


def _preload(names: Sequence[str]) -> None:
    """Import the modules that are not imported yet."""
    missing = [name for name in names if name not in sys.modules]
    with uncollected():
        for name in missing:
            importlib.import_module(name)
    if missing:
        _freeze_heap()


def _preload_torch() -> None:
    """Import the modules of stages with torch, and keep torch to one thread, because forks inherit no other."""
    if "torch" in sys.modules:
        return
    _preload(TORCH)
    sys.modules["torch"].set_num_threads(1)
    for library in ("diffusers", "transformers"):
        # The server's bars would be in the output of the flow.
        importlib.import_module(f"{library}.utils.logging").disable_progress_bar()


def _fork(order: dict[str, Any], replies: TextIO, reports: dict[int, IO[bytes]]) -> None:
    """Fork a runner, and store the file of its report under its pid."""
    sys.stdout.flush()
    # A file, because writing to a pipe may block; in memory, because the disk may be full.
    report = os.fdopen(os.memfd_create("report"), "w+b")
    pid = os.fork()
    if pid == 0:
        replies.close()
        _run(order, report)
    reports[pid] = report
    _reply(replies, {"pid": pid})


def _run(order: dict[str, Any], report: IO[bytes]) -> None:
    """Run the stage in the fork, and end the process."""
    before = set(sys.modules)
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        meeting = Path(order["request"]).with_name(MEETING_FILE)
        code = lead(order["ranks"], meeting) if order["ranks"] > 1 else None
        if code is None:
            code = runner.main([order["request"]])
            if runner.own_rank() == 0:
                report.write(json.dumps([_importable(before), loads()]).encode())
                report.flush()
    except BaseException as error:
        code = failure_of(error).exit_code
        with suppress(OSError):
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        # The log may be on a full disk.
        with suppress(OSError):
            stream.flush()
    # sys.exit would run the server's own cleanup.
    os._exit(code)


def _importable(before: Iterable[str]) -> list[str]:
    """Return the modules from files that were imported since ``before``, in order."""
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in before and (spec := getattr(module, "__spec__", None)) is not None and spec.has_location
    ]


def _repeat(report: IO[bytes]) -> None:
    """Import and load what a fork imported and loaded, as far as that works here."""
    report.seek(0)
    if not (text := report.read()):
        return
    modules, calls = json.loads(text)
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    for call in calls:
        _load(Load(*call))
    _freeze_heap()


def _load(load: Load) -> None:
    """Load the model or scorer that a fork loaded, if all of them stay within :data:`READY_BYTES`."""
    if is_ready(load) or load.num_bytes + sum(_READY_BYTES) > READY_BYTES:
        return
    try:
        found = getattr(importlib.import_module(load.module), load.function)(*load.arguments)
    except ConfigError:
        # A plugin from outside, which only forks know.
        return
    except Exception as error:
        # Files may have gone. The stage that needs it loads it, or reports the error.
        print(f"the fork server does not load {load.function} for the next stages: {error}", file=sys.stderr)
        return
    make_ready(load, found)
    _READY_BYTES.append(load.num_bytes)


def _remember_packages() -> None:
    """Cache versions and plugins of installed packages, which each fork would look up otherwise."""
    numerics.versions(numerics.LIGHT_PACKAGES + numerics.TORCH_PACKAGES)
    for kind in plugins.KINDS:
        plugins.known(kind)


def _freeze_heap() -> None:
    """Exempt all existing objects from garbage collection, which would copy their memory pages in each fork."""
    gc.collect()
    gc.freeze()


def _reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
