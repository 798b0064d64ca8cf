"""Modules of diffusers and transformers, read from their folders with every weight that they need."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmos_rl_core.errors import ArtifactError, counted

ALIGNMENT_BYTES = 64
"""Boundary on which PyTorch's allocator places tensors on the CPU."""


def read_module(cls: Any, folder: str | Path, where: str, **options: Any) -> nn.Module:
    """Return a module of the class ``cls`` with the weights in ``folder``. Only safetensors are read, never a pickle.

    ``options`` go to ``from_pretrained``; ``where`` names the files in errors. Raises :class:`ArtifactError` if
    the files lack weights or have weights of another shape, and names them; the libraries would draw these weights at
    random.
    """
    reading: Any = {"use_safetensors": True, "local_files_only": True, **options}
    # With this the libraries list weights of another shape instead of raising at the first.
    reading |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        module, found = cls.from_pretrained(folder, **reading)
    except NotImplementedError:
        # With a device_map, diffusers moves missing weights off the meta device, and fails, before it lists them.
        if "device_map" in options:
            read_module(cls, folder, where, **{name: given for name, given in options.items() if name != "device_map"})
        raise
    if missing := sorted(found["missing_keys"]):
        raise ArtifactError(f"{where} lack {_listed(missing)}; fetch them again")
    if others := sorted(found["mismatched_keys"]):
        shapes = [f"{key} is {list(there)}, expected {list(expected)}" for key, there, expected in others]
        raise ArtifactError(f"{where} do not fit its config.json: {_listed(shapes)}; fetch them again")
    return module


def straight_to(device: torch.device) -> dict[str, str]:
    """Return the options of ``from_pretrained`` that read weights straight to a device, without a copy on the CPU.

    There are no options for kinds of devices on which the libraries cannot allocate; the caller moves the module there.
    """
    return {"device_map": device.type} if device.type in ("cpu", "cuda") else {}


def align(module: nn.Module) -> None:
    """Move weights on the CPU to where PyTorch allocates memory, on boundaries of :data:`ALIGNMENT_BYTES`.

    Weights of a memory-mapped file keep the file's alignment. On some CPUs the rounding of a matrix product depends on
    the alignment of its operands, so that equal copies of a part would not predict equally.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_cpu and tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


def _listed(names: Sequence[str]) -> str:
    """Return the number of ``names`` and the first three."""
    return f"{counted(len(names), 'weight')}: {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
