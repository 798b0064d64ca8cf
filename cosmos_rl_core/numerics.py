"""What decides the last bits of a result besides its recipe: versions, device, threads, world size, flags."""

import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import Any

LIGHT_PACKAGES = ("numpy", "pandas", "pyarrow", "pillow", "onnxruntime", "rapidocr", "av")
TORCH_PACKAGES = (
    "numpy",
    "torch",
    "diffusers",
    "transformers",
    "tokenizers",
    "ftfy",
    "peft",
    "pandas",
    "pyarrow",
    "pillow",
    "av",
)


def numerics(*, world_size: int, threads: int, deterministic: bool, torch: Any = None) -> dict[str, Any]:
    """Names and values. Equal values promise equal bits (with ``deterministic``).

    They say how an artifact was made and have no part in which one is asked for. ``torch`` is the imported module for
    stages that use it, None for light ones.
    """
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "world_size": world_size,
        "threads": threads,
        "deterministic": deterministic,
        "packages": _versions(LIGHT_PACKAGES if torch is None else TORCH_PACKAGES),
    }
    if torch is not None:
        cuda = torch.cuda.is_available()
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        found["device"] = torch.cuda.get_device_name() if cuda else "cpu"
        found["cuda"] = torch.version.cuda if cuda else None
        found["dtype"] = "float32"
        found["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    return found


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {name: version for name in packages if (version := _version(name)) is not None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    if sys.platform != "linux":
        return platform.processor()
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
