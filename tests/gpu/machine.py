"""The device and what it does at most: matrix products and copies, by its own clock."""

import os
import platform

import psutil
import torch

from cosmos_rl_core.numerics import numerics
from tests.benchmarks import flops, record
from tests.benchmarks.timing import seconds_of
from tests.gpu.task import Rows, Task

WIDTH, COPIED_BYTES, REPEATS = 8192, 2**31, 10


def rows(task: Task) -> Rows:
    """Yield the device's name and settings, and its measured peaks."""
    device = torch.device("cpu" if task.tiny else "cuda")
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else psutil.virtual_memory().total
    facts = {"device": record.device_name(), "device_bytes": memory, "cpus": os.cpu_count()}
    yield {"what": "machine", **facts, "kernel": platform.release(), "numerics": numerics(torch)}
    width, size = (64, 2**16) if task.tiny else (WIDTH, COPIED_BYTES)
    published = flops.peak_flops(record.device_name(), "bfloat16")
    for dtype in (torch.bfloat16, torch.float32):
        # Random numbers: products of zeros are faster.
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        seconds = seconds_of(lambda a=a, b=b: a @ b, device, REPEATS)
        name = str(dtype).removeprefix("torch.")
        yield {
            "what": "matrix product",
            "dtype": name,
            "width": width,
            "seconds": seconds,
            "flops_per_s": 2 * width**3 / seconds,
            "published_flops_per_s": published if dtype == torch.bfloat16 else None,
        }
        del a, b
    there = torch.empty(size, dtype=torch.uint8, device=device).random_()
    other = torch.empty_like(there)
    seconds = seconds_of(lambda: other.copy_(there), device, REPEATS)
    yield {"what": "copy on the device", "bytes_per_s": 2 * size / seconds, "counts": "bytes read and written"}
    here = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=on_gpu).random_()
    seconds = seconds_of(lambda: other.copy_(here, non_blocking=True), device, REPEATS)
    yield {"what": "copy to the device from pinned memory", "bytes_per_s": size / seconds}
