"""What a transformer computes with: float32, or a half type by autocast, from float32 weights to a float32 velocity.

Autocast gives linear and convolution modules alone a half type; norms, tables and residuals stay float32. Some classes
of diffusers name modules that are float32 whatever the rest is (``_keep_in_fp32_modules``), such as the embedding of
Wan's timestep: :func:`keep_float32` has those of them that hold matrices compute so under autocast too.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

ParamDtype = Literal["float32", "bfloat16"]


def half(param_dtype: ParamDtype) -> torch.dtype | None:
    """The half type, or None for float32."""
    return torch.bfloat16 if param_dtype == "bfloat16" else None


def computes_in(param_dtype: ParamDtype, device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in ``param_dtype`` on ``device``; put it around a transformer's forward pass and nothing else."""
    dtype = half(param_dtype)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def use_tf32(allowed: bool) -> None:
    """Choose how a GPU multiplies float32 matrices and convolves: with factors rounded to 10 bits, or whole."""
    # PyTorch's own defaults are unlike each other: whole for products, rounded for convolutions.
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The modules whose weights autocast casts."""


def float32_modules(transformer: nn.Module) -> list[nn.Module]:
    """The outermost modules with matrices in them that the transformer's class keeps in float32.

    As ``from_pretrained`` of diffusers reads the list: by any part of a weight's name.
    """
    kept = set(getattr(transformer, "_keep_in_fp32_modules", None) or [])
    found: dict[str, nn.Module] = {}
    for name, module in transformer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and kept & set(name.split(".")) and any(isinstance(part, MATRICES) for part in module.modules()):
            found[name] = module
    return list(found.values())


def keep_float32(transformer: nn.Module) -> None:
    """Have :func:`float32_modules` compute in float32 under autocast: in place, by a class of their own each."""
    for module in float32_modules(transformer):
        own = type(module)
        if not issubclass(own, _InFloat32):
            module.__class__ = type(own.__name__, (_InFloat32, own), {})


class _InFloat32(nn.Module):
    def forward(self, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = given.device.type
        if not torch.amp.is_autocast_available(device):
            return super().forward(given, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return super().forward(given.float(), *args, **kwargs)
