"""Loading at the start of a process: large libraries, and models that a server loads for the processes it forks."""

import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cosmos_rl_core.canonical import canonical_json

T = TypeVar("T")


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off inside the block.

    Use it where thousands of objects are made and stay, such as modules or records of a run. The collector would search
    all of them repeatedly and find nothing, which takes a sixth to a quarter of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


WARNS = "transformers.utils.import_utils"
"""Name of the logger by which transformers warns that torchvision is missing."""


def without_torchvision_warnings() -> None:
    """Drop transformers' warnings that torchvision is missing, until this process ends.

    They call for no action: this project leaves torchvision out on purpose.
    """
    logging.getLogger(WARNS).addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "requires torchvision (not installed)" not in record.getMessage()


class Load(NamedTuple):
    """A call of :func:`loaded`: a function of a module, and its arguments as JSON values."""

    module: str
    function: str
    arguments: list[Any]
    num_bytes: int
    """Bytes by which the call made the memory of the process grow."""


_READY: dict[bytes, Any] = {}
"""Values that the server of this fork has loaded, by the key of the call."""
_LOADS: list[Load] = []
"""Calls by which this process itself loaded something."""


def loaded(function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, or the value that the server of this fork has already loaded by the same call.

    The arguments are JSON values and name everything that decides the result, such as times of files. The caller may
    change the value: a fork has its own copy of its server's memory, and a second equal call loads again. ``function``
    must start no thread, because a fork has only one, and must compute on the CPU.
    """
    key = _key(function.__module__, function.__qualname__, arguments)
    if key in _READY:
        return _READY.pop(key)
    before = _resident_bytes()
    found = function(*arguments)
    grown = max(0, _resident_bytes() - before)
    _LOADS.append(Load(function.__module__, function.__qualname__, [*arguments], grown))
    return found


def loads() -> list[Load]:
    """Return the calls by which this process itself loaded something; its server may repeat them for the next forks."""
    return [*_LOADS]


def is_ready(load: Load) -> bool:
    """Return whether this server keeps the result of this call."""
    return _key(load.module, load.function, load.arguments) in _READY


def make_ready(load: Load, found: Any) -> None:
    """Keep the result of a call for the forks of this server."""
    _READY[_key(load.module, load.function, load.arguments)] = found


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    except OSError:
        return 0
    return int(pages) * mmap.PAGESIZE


def _key(module: str, function: str, arguments: Any) -> bytes:
    return canonical_json([module, function, [*arguments]])
