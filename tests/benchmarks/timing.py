"""Seconds of work on a device, whose host runs ahead of it."""

import gc
import statistics
import time
from collections.abc import Callable

import torch

WARM_UPS = 2


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int, warm_ups: int = WARM_UPS) -> float:
    """Return the median seconds of ``repeats`` calls, each waited for, after ``warm_ups``."""
    for _ in range(warm_ups):
        work()
    seconds: list[float] = []
    for _ in range(repeats):
        finish(device)
        started_s = time.perf_counter()
        work()
        finish(device)
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_of(work: Callable[[], object], device: torch.device) -> int | None:
    """Return the most bytes of the device's memory that are allocated during a call; None for a CPU."""
    if device.type != "cuda":
        work()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    work()
    finish(device)
    return torch.cuda.max_memory_allocated(device)


def free(device: torch.device) -> None:
    """Give back what the last model took: the next one needs the memory."""
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
