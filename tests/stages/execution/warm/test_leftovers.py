"""What a Request leaves in its process is found, whatever it is, and what it may change is put back."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from cosmos_rl_core.processes import age_s, become_rank, begin_again
from stages.execution import torch_runtime
from stages.execution.execution import Execution
from stages.execution.warm.leftovers import DEVICE_SLACK_BYTES, SLACK_BYTES, Leftovers, live_bytes, settle

KEPT: list[torch.Tensor] = []
Leak = Callable[[], Callable[[], object]]
"""Leaves something, and returns what takes it away."""


@contextmanager
def left(leak: Leak) -> Iterator[list[str]]:
    torch_runtime.set_up(Execution(threads=torch.get_num_threads()))
    before = Leftovers()
    undo = leak()
    try:
        yield before.found()
    finally:
        undo()


def a_hook() -> Callable[[], object]:
    return nn.modules.module.register_module_forward_hook(lambda *_: None).remove


def a_hook_of_optimizers() -> Callable[[], object]:
    return register_optimizer_step_post_hook(lambda *_: None).remove


def a_dtype() -> Callable[[], object]:
    torch.set_default_dtype(torch.bfloat16)
    return lambda: torch.set_default_dtype(torch.float32)


def a_device() -> Callable[[], object]:
    torch.set_default_device("meta")
    return lambda: torch.set_default_device(None)


def a_tensor() -> Callable[[], object]:
    KEPT.append(torch.zeros(SLACK_BYTES // 4 + 1))
    return KEPT.clear


def no_gradients() -> Callable[[], object]:
    torch.set_grad_enabled(False)
    return lambda: torch.set_grad_enabled(True)


def autocast() -> Callable[[], object]:
    entered = torch.autocast("cpu", torch.bfloat16)
    entered.__enter__()
    return lambda: entered.__exit__(None, None, None)


def threads_of_torch() -> Callable[[], object]:
    number = torch.get_num_threads()
    torch.set_num_threads(number + 1)
    return lambda: torch.set_num_threads(number)


def kernels() -> Callable[[], object]:
    torch.use_deterministic_algorithms(False)
    return lambda: torch.use_deterministic_algorithms(True)


def a_variable() -> Callable[[], object]:
    os.environ["LEFT_BEHIND"] = "1"
    return lambda: os.environ.pop("LEFT_BEHIND")


def a_folder() -> Callable[[], object]:
    before = Path.cwd()
    os.chdir("/")
    return lambda: os.chdir(before)


def a_handler() -> Callable[[], object]:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return lambda: signal.signal(signal.SIGTERM, before)


def a_thread() -> Callable[[], object]:
    over = threading.Event()
    threading.Thread(target=over.wait, name="left behind", daemon=False).start()
    return over.set


def a_process() -> Callable[[], object]:
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    return lambda: (started.kill(), started.wait())


def a_group() -> Callable[[], object]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return torch.distributed.destroy_process_group


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (a_hook, "hooks of all modules: {'_global_forward_hooks': 0} before, {'_global_forward_hooks': 1} now"),
        (a_hook_of_optimizers, "hooks of all modules: {'after': 0} before, {'after': 1} now"),
        (a_dtype, "numerics: {'default_dtype': 'float32'} before, {'default_dtype': 'bfloat16'} now"),
        (a_device, "'device': 'meta'"),
        (a_tensor, f"tensors: {SLACK_BYTES + 4} bytes more than before"),
        (no_gradients, "settings of PyTorch: {'grad': True} before, {'grad': False} now"),
        (autocast, "settings of PyTorch: {'autocast': [(False,"),
        (threads_of_torch, "numerics: {'threads': "),
        (kernels, "numerics: {'deterministic': True} before, {'deterministic': False} now"),
        (a_variable, "environment: {'LEFT_BEHIND': None} before, {'LEFT_BEHIND': '1'} now"),
        (a_folder, "working directory: "),
        (a_handler, "handlers of signals: {'SIGTERM': "),
        (a_thread, "left behind"),
        (a_process, "processes: ["),
        (a_group, "process group: none before, open now"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_leftovers_of_a_request_are_reported(leak: Leak, said: str) -> None:
    with left(leak) as found:
        assert len(found) == 1
        assert said in found[0]


def test_changes_that_every_stage_makes_are_undone_and_are_no_leftovers(tmp_path: Path) -> None:
    torch_runtime.set_up(Execution(threads=torch.get_num_threads()))
    expected = torch.get_rng_state()
    before = Leftovers()
    became_rank = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "COSMOS_RL_MEETING", "COSMOS_RL_BEGAN_S")
    environment = dict(os.environ)
    begin_again()
    assert age_s() < 1.0
    become_rank(1, 2, tmp_path / "meeting", alone=True)
    assert [os.environ[name] for name in became_rank[:4]] == ["1", "0", "2", "2"]
    drawn = torch.rand(3)
    assert before.found() == []
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), expected)
    # A new process draws the same.
    assert torch.equal(torch.rand(3), drawn)
    torch.set_rng_state(expected)


def test_device_memory_still_in_use_is_reported_and_freed_memory_is_given_back(device: torch.device) -> None:
    settle("cuda" if device.type == "cuda" else "cpu")
    before = Leftovers()
    kept = [torch.zeros(DEVICE_SLACK_BYTES + 512, dtype=torch.uint8, device=device)]
    what = "memory of the device" if device.type == "cuda" else "tensors"
    assert before.found() == [f"{what}: {DEVICE_SLACK_BYTES + 512} bytes more than before"]
    kept.clear()
    assert before.found() == []


def test_the_bytes_of_a_tensor_count_once_however_many_look_at_them() -> None:
    Leftovers()
    before = live_bytes()
    whole = torch.zeros(1000)
    parts = [whole[:10], whole.view(10, 100), torch.zeros(4, device="meta")]
    assert live_bytes() - before == 4000
    del whole, parts
    assert live_bytes() == before
