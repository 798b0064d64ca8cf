"""Attention of rows that are divided into segments: each token attends within its segment alone.

The segments of a row are its conversations; in a vision tower, frames or windows. A row costs as much as its segments.
On a GPU, one kernel computes segments of any length in half types. Elsewhere, segments of equal length are computed as
a batch. Models of transformers call this attention by its name once :func:`use` was called.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cosmos_rl_core.numerics import has_varlen

NAME = "flash_of_segments"
"""Name of the attention in transformers. Because it has "flash" in it, vision towers pass the borders of frames to one
call instead of calling it for each frame."""
BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Arguments of forwards that say where segments end."""
HALVES = (torch.bfloat16, torch.float16)
MAX_WIDTH, WIDTH_STEP = 256, 8
"""Largest width of a head that the kernel takes, and the number that divides each width."""


class Pattern(NamedTuple):
    """Settings of attention within a segment."""

    scaling: float | None
    causal: bool
    window: int | None
    """Number of the last tokens that a token attends to; None for all."""


def use(model: Any) -> None:
    """Make a model of transformers attend by segments, if its class takes an attention from outside."""
    if model._supports_attention_backend:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        # Not set_attn_implementation, which would look for a package of this name.
        model.config._attn_implementation = NAME
        for name, part in model.base_model.named_children():
            if name != "language_model":
                part.register_forward_pre_hook(_without_borders, with_kwargs=True)


def _without_borders(_part: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Remove the borders of conversations from a vision tower's arguments: older releases of transformers add them."""
    return args, {name: value for name, value in named.items() if name not in BORDERS}


def is_used(model: Any) -> bool:
    """Return whether a model attends by segments."""
    return model.config._attn_implementation == NAME


def borders(lengths: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model's forward that divide its rows into segments of ``lengths``, on the CPU.

    One segment needs no arguments.
    """
    if len(lengths) == 1:
        return {}
    ends = functional.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
    longest = int(lengths.max())
    _remember(ends, lengths.tolist())
    return dict(zip(BORDERS, (ends, ends, longest, longest), strict=True))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention ``[rows, tokens, heads, width]`` from ``[rows, heads, tokens, width]``, as in transformers.

    Without borders it equals ``sdpa``. Raises ``ValueError`` for borders together with a mask or dropout.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        settings: Any = {"scaling": scaling, "is_causal": is_causal, "sliding_window": sliding_window} | others
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if attention_mask is not None or others.get("dropout"):
        raise ValueError("segments have neither a mask nor dropout")
    rows, causal = query.shape[0], module.is_causal if is_causal is None else is_causal
    tokens = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    window = sliding_window if causal and sliding_window and sliding_window < max_length_q else None
    pattern = Pattern(scaling, causal, window)
    dtype = _computed_in(tokens[0])
    if tokens[0].is_cuda and has_varlen(torch) and _is_taken(tokens[0], dtype):
        query, key, value = (one.to(dtype) for one in tokens)
        found = by_kernel(query, key, value, cu_seq_lens_q, max_length_q, pattern)
    else:
        query, key, value = tokens
        found = by_blocks(query, key, value, _lengths(cu_seq_lens_q), pattern)
    return found.unflatten(0, (rows, -1)), None


def by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    pattern: Pattern,
) -> Tensor:
    """Return attention ``[tokens, heads, width]`` by one call of the kernel. ``ends`` are 0 and the segments' ends."""
    before = -1 if pattern.window is None else pattern.window - 1
    seen = (before, 0) if pattern.causal else (-1, -1)
    grouped = query.shape[1] != key.shape[1]
    return varlen.varlen_attn(  # pyright: ignore[reportReturnType]
        query, key, value, ends, ends, longest, longest, scale=pattern.scaling, window_size=seen, enable_gqa=grouped
    )


def by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    pattern: Pattern,
) -> Tensor:
    """Return attention ``[tokens, heads, width]``, for all segments of one length at a time."""
    if len(set(lengths)) == 1:
        batch = [tensor.unflatten(0, (len(lengths), -1)) for tensor in (query, key, value)]
        return _of_batch(batch, pattern).flatten(0, 1)
    # Split once: the gradient of each slice would be a tensor as long as the row.
    parts = [tensor.split(list(lengths)) for tensor in (query, key, value)]
    found: dict[int, Tensor] = {}
    for length in dict.fromkeys(lengths):
        members = [number for number, one in enumerate(lengths) if one == length]
        batch = [torch.stack([part[number] for number in members]) for part in parts]
        found |= dict(zip(members, _of_batch(batch, pattern), strict=True))
    return torch.cat([found[number] for number in range(len(lengths))])


def _of_batch(batch: Sequence[Tensor], pattern: Pattern) -> Tensor:
    """Return attention of queries, keys and values of segments of one length, ``[segments, tokens, heads, width]``."""
    query, key, value = (tensor.transpose(1, 2) for tensor in batch)
    length, window = query.shape[2], pattern.window
    mask = None if window is None or length <= window else _band(length, window, query.device)
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        scale=pattern.scaling,
        is_causal=pattern.causal and mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Return a causal mask of the last ``window`` tokens."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _computed_in(tensor: Tensor) -> torch.dtype:
    """Return the type to compute in: autocast's, which does not know the kernel, or else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _is_taken(query: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes the type and the width of the heads."""
    return dtype in HALVES and query.shape[-1] <= MAX_WIDTH and query.shape[-1] % WIDTH_STEP == 0


def _lengths(ends: Tensor) -> list[int]:
    """Return the lengths of segments. All layers of a forward pass share the tensor; only the first waits for it."""
    found: list[int] | None = getattr(ends, "_lengths", None)
    return _remember(ends, ends.diff().tolist()) if found is None else found


def _remember(ends: Tensor, lengths: list[int]) -> list[int]:
    ends._lengths = lengths  # pyright: ignore[reportAttributeAccessIssue]
    return lengths
