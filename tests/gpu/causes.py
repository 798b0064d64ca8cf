"""Where the seconds of a piece of work on a device go: kernels by kind, and the time in which it waits for its host."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.timing import finish

KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::linear"),
    "attention": ("attention",),
    "convolutions": ("convolution", "conv2d", "conv3d"),
    "copies and casts": ("aten::copy_", "aten::_to_copy", "aten::cat", "aten::fill_", "aten::zero_", "Memcpy"),
    "optimizer": ("aten::_fused_adam", "aten::_foreach", "Optimizer"),
}
"""Parts of the names of operations, by what they are; a name goes to the first that fits."""
OTHER, IDLE = "other kernels", "device idle"


def causes(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Do the work once under PyTorch's profiler, which slows the host; return its seconds and what they went to.

    On a GPU the kinds are kernels by the operation that started them, and the rest of the clock's seconds is idle time.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    finish(device)
    with profile(activities=activities) as found:
        began_s = time.perf_counter()
        work()
        finish(device)
        seconds = time.perf_counter() - began_s
    by_kind: dict[str, float] = defaultdict(float)
    kernels_s = 0.0
    for event in found.key_averages():
        if event.device_type != DeviceType.CPU:
            # The kernels themselves, which the operations that started them have too.
            kernels_s += 0.0 if event.is_user_annotation else event.self_device_time_total / 1e6
            continue
        own_s = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        by_kind[_kind_of(event.key)] += own_s
    if on_gpu:
        # Kernels that no operation of PyTorch started, such as kernels of compiled code.
        by_kind[OTHER] += max(0.0, kernels_s - sum(by_kind.values()))
        by_kind[IDLE] = max(0.0, seconds - sum(by_kind.values()))
    return {"seconds": seconds, "by_cause": {name: round(own_s, 6) for name, own_s in sorted(by_kind.items())}}


def _kind_of(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)
