"""What a transformer computes with: float32, or a half type by autocast, from float32 weights to a float32 velocity."""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

ParamDtype = Literal["float32", "bfloat16"]


def half(param_dtype: ParamDtype) -> torch.dtype | None:
    """The half type, or None for float32."""
    return torch.bfloat16 if param_dtype == "bfloat16" else None


def computes_in(param_dtype: ParamDtype, device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in ``param_dtype`` on ``device``; put it around a transformer's forward pass and nothing else."""
    dtype = half(param_dtype)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
