"""The precision of a transformer: float32, or a half type by autocast, with float32 weights and a float32 velocity.

Autocast casts only linear and convolution modules; norms, tables and residuals stay float32. Some classes of diffusers
list modules that must stay float32 (``_keep_in_fp32_modules``), for example the embedding of Wan's timestep. Some of
its attention processors cast to float32 before they multiply, because a sum over all tokens loses too much in a half
type. :func:`keep_float32` makes both compute in float32 under autocast too.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from cosmos_rl_core.config.parallelism import Attention
from cosmos_rl_core.numerics import SDP_KERNELS

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


def use_attention(kernel: Attention) -> None:
    """Permit one kernel of attention in this process, or all but ``cudnn``, whatever was permitted before.

    The gradient of cuDNN's kernel, which PyTorch prefers on H100 and H200, can be wrong by orders of magnitude there
    (PyTorch 2.11, cuDNN 9.19): padded keys count as scores of 0. Source: https://github.com/pytorch/pytorch/issues/196678.
    """
    for name in SDP_KERNELS:
        short = name.removeprefix("mem_")
        permitted = name != "cudnn" if kernel == "auto" else kernel == short
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(permitted)


@contextmanager
def with_tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 like :func:`use_tf32` inside a ``with`` block, and restore what was set before it."""
    products, convolutions = torch.backends.cuda.matmul, cast("Any", torch.backends.cudnn)
    before = products.allow_tf32, convolutions.allow_tf32
    use_tf32(allowed)
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


def score_in_float32() -> None:
    """Forbid TF32 in this process, which is about to score with torch.

    The version of a scorer does not record TF32, and equal versions must mean equal scores: in the stage `judge`, whose
    execution never allows TF32, in the reward service, and in `cosmos-flows score`.
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


LINEAR_ATTENTION = ("SanaLinearAttnProcessor2_0", "SanaLinearAttnProcessor3_0")
"""Classes of diffusers' attention processors that multiply queries, keys and values in float32 in every precision."""


def keep_float32(transformer: nn.Module) -> None:
    """Make :func:`float32_modules`, and the products of linear attention, compute in float32 under autocast.

    Their classes are replaced in place.
    """
    for module in float32_modules(transformer):
        own = type(module)
        if not issubclass(own, _InFloat32):
            module.__class__ = type(own.__name__, (_InFloat32, own), {})
    for module in transformer.modules():
        own = type(processor := getattr(module, "processor", None))
        if own.__name__ in LINEAR_ATTENTION and not issubclass(own, _Float32Products):
            processor.__class__ = _multiplying_in_float32(own)


class _InFloat32(nn.Module):
    def forward(self, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = given.device.type
        if not torch.amp.is_autocast_available(device):
            return super().forward(given, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return super().forward(given.float(), *args, **kwargs)


class _Float32Products:
    """Marks attention processors that multiply in float32 under autocast."""


def _multiplying_in_float32(own: Any) -> type:
    """Return a class of attention processors that call the class ``own`` with autocast off, except for projections.

    Projections stay in the half type, in which their weights may be stored.
    """

    @wraps(own.__call__)  # diffusers reads the names of its arguments
    def call(processor: Any, attn: nn.Module, hidden_states: Tensor, **named: Any) -> Tensor:
        device = hidden_states.device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return own.__call__(processor, attn, hidden_states, **named)
        projecting = _Projecting(attn, device, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return own.__call__(processor, projecting, hidden_states, **named)

    return type(own.__name__, (_Float32Products, own), {"__call__": call})


class _Projecting:
    """An attention module as a processor of linear attention reads it; only its projections run under autocast."""

    def __init__(self, attn: Any, device: str, dtype: torch.dtype) -> None:
        def in_half(projection: nn.Module) -> Callable[[Tensor], Tensor]:
            def projected(given: Tensor) -> Tensor:
                with torch.autocast(device, dtype):
                    return projection(given)

            return projected

        self.heads, self.norm_q, self.norm_k = attn.heads, attn.norm_q, attn.norm_k
        self.to_q, self.to_k, self.to_v = map(in_half, (attn.to_q, attn.to_k, attn.to_v))
        self.to_out = [in_half(attn.to_out[0]), attn.to_out[1]]
