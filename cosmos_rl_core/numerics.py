"""The numerics of a process: package versions, device and precision switches that can change the bits of results."""

import functools
import importlib.metadata
import platform
import re
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "pandas", "pyarrow", "pillow", "av")
LIGHT_PACKAGES = (*_PACKAGES, "onnxruntime", "rapidocr")
"""Packages that can change the results of a stage without torch."""
TORCH_PACKAGES = (*_PACKAGES, "torch", "diffusers", "transformers", "tokenizers", "ftfy", "peft")
"""Packages that can change the results of a stage with torch."""


def numerics(torch: Any = None) -> dict[str, Any]:
    """Return the settings that can change the bits of this process's results: JSON values by name.

    Equal values give equal bits if ``deterministic`` is true. They describe how an artifact was made and are not part
    of its fingerprint. ``torch`` is the imported module, whose current switches are read. A stage without torch passes
    None and records only its packages, so that any node can run it. A process with a GPU records the GPU, not the CPU.
    """
    light = {"python": platform.python_version()}
    if torch is None:
        return light | {"packages": versions(LIGHT_PACKAGES)}
    found = light | {
        "packages": versions(TORCH_PACKAGES),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if torch.cuda.is_available():
        return found | _of_gpu(torch)
    capability = torch.backends.cpu.get_cpu_capability()
    # Left out where all kernels of a CPU are permitted, so that such records equal the records of earlier versions.
    kernels = [name for name in _kernels(torch) if name != "cudnn"]
    permitted = {} if len(kernels) == len(SDP_KERNELS) - 1 else {"attention_kernels": kernels}
    return found | {"device": "cpu", "cpu": _cpu_model(), "cpu_capability": capability} | permitted


def _kernels(torch: Any) -> list[str]:
    """Return the permitted kernels of attention. PyTorch names the switches after CUDA; they serve CPUs too."""
    return sorted(name for name in SDP_KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")())


def _of_gpu(torch: Any) -> dict[str, Any]:
    backends = torch.backends
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "cudnn": backends.cudnn.version(),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "matmul_tf32": backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": backends.cudnn.allow_tf32,
        "bf16_reduced_precision_reduction": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn_deterministic": backends.cudnn.deterministic,
        "cudnn_benchmark": backends.cudnn.benchmark,
        "attention_kernels": _kernels(torch),
        "segment_attention": "varlen" if has_varlen(torch) else "blocks",
    }


def has_varlen(torch: Any) -> bool:
    """Return whether this process's GPU has PyTorch's kernel for attention in segments of any length."""
    return torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= (8, 0)


SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
"""Attention kernels of PyTorch; each can be switched off."""


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each of ``packages`` that is installed, by name; read once in a process and its forks."""
    return {name: version for name in packages if (version := _version(name)) is not None}


@functools.cache
def _version(name: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)


def _cpu_model() -> str:
    if sys.platform != "linux":
        return platform.processor()
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    model = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return model[1].strip() if model else platform.machine()
