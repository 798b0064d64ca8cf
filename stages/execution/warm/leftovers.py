"""Leftovers of a Request in its process, and the check that there are none that a next Request could notice.

A process that serves several Requests begins each of them in the same state, or it ends. What every Request changes is
put back first: variables of its ranks, the state of random generators, caches of the allocator.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import torch
import torch.distributed as dist
from diffusers.models import attention_dispatch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from cosmos_rl_core.config.parallelism import Device
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.parallel import compiling
from cosmos_rl_core.parallel.devices import settled
from cosmos_rl_core.parallel.kept import KEPT
from cosmos_rl_core.processes import be_no_rank

SLACK_BYTES = 2**20
"""Bytes of tensors on the CPU that may be left, such as small constants that a library makes on first use."""
DEVICE_SLACK_BYTES = 64 * 2**20
"""Bytes of the device's memory that may be left: workspaces that libraries keep for their handles."""
DEVICES = ("cpu", "cuda")
ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
"""Variable that inductor sets for itself before it loads compiled code."""
_GLOBAL = "_global_"
"""Beginning of the names of PyTorch's tables of hooks."""


def settle(device: Device | None) -> None:
    """Let this process use its device, so that the context of CUDA is there before the first Request.

    An error of the device is left to the Request: it occurs there again, and the runner reports it.
    """
    with suppress(ConfigError, RuntimeError):
        settled_on = settled(device)
        if settled_on.type == "cuda":
            torch.cuda.set_device(settled_on)
            torch.cuda.init()


class Leftovers:
    """The state of this process before its first Request, with which it is compared after each one."""

    def __init__(self, set_up: Callable[[], None] = lambda: None) -> None:
        """Record the state. ``set_up`` sets up the process for a Request, which may have changed precision switches."""
        self._set_up = set_up
        self._random = _random()
        self._before = {name: read() for name, read in _FACTS.items()}
        self._allocated = _allocated()
        gc.collect()
        # Objects that exist by now are no leftovers, and later collections need not go through them.
        gc.freeze()

    def found(self) -> list[str]:
        """Put back what every Request changes, and return all other differences from the state before, in words."""
        be_no_rank()
        self._set_up()
        _free()
        _seed_again(self._random)
        now = {name: read() for name, read in _FACTS.items()}
        changed = [_change(name, before, now[name]) for name, before in self._before.items() if now[name] != before]
        kept = [f"frozen weights: other bits in {', '.join(names)}"] if (names := KEPT.changed()) else []
        # Checksums take hundreds of megabytes for a moment, which the next Request would find reserved.
        _free_device()
        return [*changed, *kept, *_more("tensors", live_bytes(), 0, SLACK_BYTES), *self._on_device()]

    def _on_device(self) -> list[str]:
        # The allocator rounds each tensor up to whole blocks: at most 512 bytes more.
        kept = sum(tensor.nbytes + 512 for tensor in KEPT.tensors if tensor.is_cuda)
        return _more("memory of the device", _allocated(), self._allocated + kept, DEVICE_SLACK_BYTES)


def _change(name: str, before: Any, now: Any) -> str:
    """Return in words what changed; only the changed entries of a mapping."""
    if isinstance(before, dict):
        names = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        before, now = ({key: of.get(key) for key in names} for of in (before, now))
    return f"{name}: {before} before, {now} now"


def _more(what: str, now: int, before: int, slack: int) -> list[str]:
    return [f"{what}: {now - before} bytes more than before"] if now - before > slack else []


def live_bytes() -> int:
    """Return the bytes of all tensors on the CPU that were made since :class:`Leftovers`, are alive and not kept."""
    # Only these exact classes: tensors of the compiler have no bytes, and a sharded tensor holds one of these.
    found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    kept = {tensor.untyped_storage().data_ptr() for tensor in KEPT.tensors}
    storages = {}
    for tensor in found:
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in storages.items() if place not in kept)


def _free() -> None:
    """Give back memory that nothing refers to, and caches of PyTorch."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        # Compiled blocks refer to the modules that they were compiled for.
        dynamo.reset()
        compiling.end_workers()
        # An address in this process, by which compiled code finds PyTorch.
        os.environ.pop(ADDRESS, None)
    if (sharded := sys.modules.get("torch.distributed.tensor._random")) is not None:
        # The tracker belongs to a mesh, and making one is a collective: ranks without one would wait for the others.
        vars(sharded)["_rng_tracker"] = None
    gc.collect()
    torch.clear_autocast_cache()
    _free_device()


def _free_device() -> None:
    """Give back the caches of the allocators, and forget the peak of memory."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        # Frees the pages of CPU memory that copies to the device went through.
        # Its public name, torch.accelerator.empty_host_cache, is not in every version that runs may have.
        torch._C._host_emptyCache()
        torch.cuda.reset_peak_memory_stats()


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0


def _random() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _seed_again(states: list[Tensor]) -> None:
    """Set the random generators back to their states in a new process."""
    on_cpu, *on_devices = states
    torch.set_rng_state(on_cpu)
    if on_devices:
        torch.cuda.set_rng_state_all(on_devices)


def _group() -> str:
    return "open" if dist.is_available() and dist.is_initialized() else "none"


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _switches() -> dict[str, Any]:
    """Return settings of PyTorch that the numerics do not name."""
    cpu = torch.backends.mkldnn
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "device": str(torch.get_default_device()),
        "autocast": [(torch.is_autocast_enabled(on), str(torch.get_autocast_dtype(on))) for on in DEVICES],
        "attention": str(attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]),
        "modes": [torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()],
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        "threads between operators": torch.get_num_interop_threads(),
        "onednn": [cpu.enabled, cpu.deterministic],
        "cudnn": torch.backends.cudnn.enabled,
    }


def _hooks() -> dict[str, int]:
    """Return the number of hooks that run for every module and every optimizer."""
    of_modules = {
        name: len(of) for name, of in vars(module_hooks).items() if name.startswith(_GLOBAL) and isinstance(of, dict)
    }
    return of_modules | {"before steps": len(_global_optimizer_pre_hooks), "after": len(_global_optimizer_post_hooks)}


def _handlers() -> dict[str, str]:
    return {number.name: repr(signal.getsignal(number)) for number in signal.Signals}


def _threads() -> list[str]:
    """Return the threads for which the end of the interpreter waits."""
    return sorted(thread.name for thread in threading.enumerate() if not thread.daemon)


def _children() -> list[str]:
    """Return the names of the processes that this one has started."""
    return sorted(child.name() for child in psutil.Process().children(recursive=True))


def _trouble() -> dict[str, int]:
    """Return how often the device had too little memory."""
    statistics = torch.cuda.memory_stats() if torch.cuda.is_initialized() else {}
    return {name: statistics.get(name, 0) for name in ("num_ooms", "num_alloc_retries")}


_FACTS: dict[str, Callable[[], Any]] = {
    "process group": _group,
    "numerics": lambda: numerics(torch),
    "settings of PyTorch": _switches,
    "hooks of all modules": _hooks,
    "environment": _environment,
    "working directory": os.getcwd,
    "handlers of signals": _handlers,
    "threads": _threads,
    "processes": _children,
    "want of memory": _trouble,
}
"""Functions that read what a Request must leave as it was, by the name in a log."""
