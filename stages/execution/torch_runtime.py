"""Setup of torch, equal for every stage: threads, deterministic kernels, the process group."""

import os
from dataclasses import asdict
from typing import Any

import torch
from diffusers.models import attention_dispatch

from cosmos_rl_core.parallel import compiling
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in, use_attention, use_tf32
from cosmos_rl_core.storage import cache
from stages.execution.execution import Execution

CHANGE_BITS = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
"""Environment variables by which CUDA's libraries choose kernels, which changes the last bits."""

CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of the folder of compiled code."""


def start(execution: Execution) -> Group:
    """Set up this process and join its group."""
    set_up(execution)
    return Group(execution.rank_timeout_s, execution.parallelism, execution.device)


def set_up(execution: Execution) -> None:
    """Set up this process. Called again for each Request that the process begins."""
    torch.set_num_threads(execution.threads)
    use_tf32(execution.tf32)
    use_attention(execution.attention)
    if execution.deterministic:
        # cuBLAS reads this when it creates its first handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Sums in switches (NVLink SHARP) have no fixed order. NCCL reads this when it creates its first group.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.use_deterministic_algorithms(True)
        # This would fill every new buffer, to expose reads of uninitialized memory, which costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if execution.parallelism.compile:
        _set_up_compiler(execution.deterministic)


def _set_up_compiler(deterministic: bool) -> None:
    """Let inductor keep its code in this user's folder on the machine, unless the environment names another."""
    # PyTorch names its own default, which a container loses with its /tmp, in the environment when it is imported.
    is_free = os.environ.get(CODE_FOLDER) in (None, compiling.own_folder())
    if is_free and (folder := cache.of_user()) is not None:
        os.environ[CODE_FOLDER] = str(folder / "compiled")
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    compiling.set_up(deterministic=deterministic, num_cpus=len(os.sched_getaffinity(0)), num_ranks=num_ranks)


def numerics(group: Group, param_dtype: ParamDtype) -> dict[str, Any]:
    """Return the numerics, which decide the bits of this stage on every rank: names and JSON values of the process.

    ``param_dtype`` is the requested dtype of the transformer. The dtype that it really computes in is recorded.
    """
    with computes_in(param_dtype, group.device):
        is_half = torch.is_autocast_enabled(group.device.type)
        dtype = torch.get_autocast_dtype(group.device.type) if is_half else torch.get_default_dtype()
    backend, _ = attention_dispatch._AttentionBackendRegistry.get_active_backend()
    found = group.numerics | {
        "compute_dtype": str(dtype).removeprefix("torch."),
        "attention_backend": getattr(backend, "value", backend),
        **asdict(group.parallelism),
    }
    if group.device.type == "cuda":
        # The optimizer of parameters that lie on the GPU (`make_optimizer`).
        found["optimizer"] = "fused"
        found["environment"] = {name: os.environ[name] for name in CHANGE_BITS if name in os.environ}
    return found
