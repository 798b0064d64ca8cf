"""The precision of a transformer: float32, or a half type by autocast, with float32 weights and a float32 velocity.

Autocast casts only linear and convolution modules; norms, tables and residuals stay float32. Some classes of diffusers
list modules that must stay float32 (``_keep_in_fp32_modules``), for example the embedding of Wan's timestep.
:func:`keep_float32` makes the listed modules with matrices compute in float32 under autocast too.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

ParamDtype = Literal["float32", "bfloat16"]


def half(param_dtype: ParamDtype) -> torch.dtype | None:
    """Return the half type, None for float32."""
    return torch.bfloat16 if param_dtype == "bfloat16" else None


def computes_in(param_dtype: ParamDtype, device: torch.device) -> AbstractContextManager[object]:
    """Compute matrix products in ``param_dtype`` inside a ``with`` block, which holds only a transformer's forward."""
    dtype = half(param_dtype)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def use_tf32(allowed: bool) -> None:
    """Allow or forbid that a GPU rounds the factors of float32 products and convolutions to 10 bits (TF32)."""
    # PyTorch's defaults differ: it allows TF32 for convolutions but not for products.
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def score_in_float32() -> None:
    """Forbid TF32 in this process, which is about to score with torch.

    The version of a scorer assumes it and does not name it: equal versions must mean equal scores in the stage `judge`,
    whose execution never allows TF32, in the reward service, and in `cosmos-flows score`.
    """
    use_tf32(False)


MATRICES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Classes of modules whose weights autocast casts."""


def float32_modules(transformer: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that contain matrices and that the transformer's class keeps in float32.

    Like in ``from_pretrained`` of diffusers, an entry of the class's list matches any part of a dotted name.
    """
    kept = set(getattr(transformer, "_keep_in_fp32_modules", None) or [])
    found: dict[str, nn.Module] = {}
    for name, module in transformer.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if not inside and kept & set(name.split(".")) and any(isinstance(part, MATRICES) for part in module.modules()):
            found[name] = module
    return list(found.values())


def keep_float32(transformer: nn.Module) -> None:
    """Make :func:`float32_modules` compute in float32 under autocast, by replacing their classes in place."""
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
