"""Context parallelism: the peers of a process group share the tokens of each video.

A model that supports it has a function ``split`` in its ``model.py``, built from the parts here.

Each peer calls the transformer with the same full latents, timesteps and text, and gets the same full output, bit for
bit. In between it computes only its own tokens: the sequence is split after the patch embedding and joined after the
last projection. Self-attention exchanges own tokens with all attention heads for all tokens with own heads, and back,
by one all-to-all each way. Every other layer works on single tokens; cross-attention sees the whole text. Neither
tokens nor heads have to divide evenly: shares differ by at most one, without padding or masks.
Source: DeepSpeed-Ulysses, arXiv:2309.14509.

**Gradients are partial sums.** Every peer computes the same loss from the full output. The backward pass of the join
returns only the gradient of the peer's own tokens. So each parameter's gradient is the contribution of these tokens,
also for the embeddings of text and time, which each peer computes in full. The sum over the peers, not the mean, equals
the gradient of one process; the same holds for gradients of the inputs. Count the loss once, not once a peer.

All peers must make the same calls in the same order, forward and backward. Checkpointed blocks repeat their all-to-alls
in the backward pass; they get the number of tokens from the rotary tables and need no other state.
"""

from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from cosmos_rl_core.parallel.sequence_shares import shares

Axis = tuple[int, list[int]]
"""A dimension, and the size of each peer's share of it."""

TOKENS, HEADS = 1, 2
"""Dimensions of queries, keys and values ``[B, S, H, D]``."""


class Peers:
    """The group of processes that share the sequences of a transformer, seen from this one.

    Hooks outside the blocks share the grid of patches of the current forward pass.
    """

    def __init__(self, group: dist.ProcessGroup, num_heads: int) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._heads: Axis = (HEADS, shares("attention heads", num_heads, self.size))
        self.batch, self.frames, self.tokens_per_frame = 0, 0, 0

    def own(self, num_tokens: int | None = None) -> slice:
        """Return the range of this peer's tokens among ``num_tokens``, by default the tokens of the current pass."""
        sizes = shares("tokens", self.num_tokens if num_tokens is None else num_tokens, self.size)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def attention(self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> Tensor:
        """Compute the attention of own tokens to all ``num_tokens``.

        Query, key and value are ``[B, S_own, H, D]``; the result is ``[B, S_own, H D]``.
        """
        tokens: Axis = (TOKENS, shares("tokens", num_tokens, self.size))
        own_tokens = torch.cat([_as_in_kernel(x) for x in (query, key, value)])
        own_heads = _Exchange.apply(own_tokens, self._heads, tokens, self.group)
        attended = dispatch_attention_fn(*own_heads.chunk(3))
        return _Exchange.apply(attended, tokens, self._heads, self.group).flatten(HEADS).type_as(query)

    def begin(self, batch: int, frames: int, height: int, width: int) -> None:
        """Set the grid; call it where the patches are made."""
        self.batch, self.frames, self.tokens_per_frame = batch, frames, height * width

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of one sample on all peers together."""
        return self.frames * self.tokens_per_frame

    def spread(self, by_frame: Tensor) -> Tensor:
        """Expand values of frames ``[B T, C]`` to own tokens ``[B, S_own, C]``; return ``[B, C]`` unchanged."""
        if len(by_frame) == self.batch:
            return by_frame
        own, per_frame = self.own(), self.tokens_per_frame
        first, last = own.start // per_frame, -(-own.stop // per_frame)
        frames = by_frame.view(self.batch, self.frames, 1, -1)[:, first:last]
        tokens = frames.expand(-1, -1, per_frame, -1).flatten(1, 2)
        return tokens[:, own.start - first * per_frame : own.stop - first * per_frame]

    def join_after(self, transformer: Any) -> None:
        """Register hooks that join the tokens after the last projection.

        The forward pass raises ``RuntimeError`` if the projection was replaced later.
        """
        joined = transformer.proj_out

        def check(_module: nn.Module, _args: Any) -> None:
            if transformer.proj_out is not joined:
                raise RuntimeError("proj_out was replaced after the split: add LoRA first, then split")

        transformer.register_forward_pre_hook(check)

        def join(_module: nn.Module, _args: Any, own: Tensor) -> Tensor:
            """Gather the tokens of all peers: ``[B, S_own, C] -> [B, S, C]``."""
            return _Join.apply(own, (TOKENS, shares("tokens", self.num_tokens, self.size)), self.group)

        joined.register_forward_hook(join)


class _Exchange(torch.autograd.Function):
    """An all-to-all: split along one axis, one part for each peer, and join the received parts along another.

    The backward pass swaps the two axes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Axis, joined: Axis, group: dist.ProcessGroup) -> Tensor:
        ctx.cut, ctx.joined, ctx.group = cut, joined, group
        return _exchange(x, cut, joined, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.joined, ctx.cut, ctx.group), None, None, None


class _Join(torch.autograd.Function):
    """A gather of the peers' parts along an axis. The backward pass returns the gradient of the own part, unchanged."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, group: dist.ProcessGroup) -> Tensor:
        ctx.axis, ctx.rank = axis, dist.get_rank(group)
        dim, sizes = axis
        # All-gather needs equal shares, so the own part is sent to each peer by an all-to-all along a new first axis.
        copies = own.unsqueeze(0).expand(len(sizes), *own.shape)
        return _exchange(copies, (0, [1] * len(sizes)), (dim + 1, sizes), group).squeeze(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dim, sizes = ctx.axis
        return gradients[0].split(sizes, dim)[ctx.rank], None, None


def _exchange(x: Tensor, cut: Axis, joined: Axis, group: dist.ProcessGroup) -> Tensor:
    """Run one all-to-all of uneven parts."""
    (cut_dim, cut_sizes), (joined_dim, joined_sizes) = cut, joined
    sent = [part.reshape(-1) for part in x.split(cut_sizes, cut_dim)]
    shapes = []
    for size in joined_sizes:
        shape = list(x.shape)
        shape[cut_dim], shape[joined_dim] = cut_sizes[dist.get_rank(group)], size
        shapes.append(torch.Size(shape))
    counts = [shape.numel() for shape in shapes]
    received = x.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(sent), counts, [part.numel() for part in sent], group=group)
    parts = received.split(counts)
    return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], joined_dim)


def _as_in_kernel(x: Tensor) -> Tensor:
    """Cast to the type that autocast uses for attention, so that float32 outputs of norms travel in half the bytes."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class SelfAttention:
    """A processor of diffusers' attention modules: from a peer's own tokens to its own tokens."""

    def __init__(self, peers: Peers, *, norms_heads: bool, unbind_dim: int) -> None:
        """Set how the transformer normalises and rotates queries and keys.

        ``norms_heads`` normalises each head by itself instead of all heads together. ``unbind_dim`` is -1 if rotary
        tables pair neighbouring channels, -2 if they pair halves.
        """
        self._peers, self._norms_heads, self._unbind_dim = peers, norms_heads, unbind_dim

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        attention_mask: None,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the attention of own tokens to all tokens, ``[B, S_own, C]`` like ``hidden_states``.

        The rotary tables, ``[S, D]`` or ``[1, S, 1, D]``, cover all tokens.
        """
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in image_rotary_emb)
        num_tokens = len(cos)
        own = self._peers.own(num_tokens)

        def rotated(projection: Any, norm: Any) -> Tensor:
            x = projection(hidden_states)
            by_head = x.unflatten(HEADS, (attn.heads, -1))
            normed = norm(by_head) if self._norms_heads else norm(x).unflatten(HEADS, (attn.heads, -1))
            tables: Any = cos[own], sin[own]
            x: Any = apply_rotary_emb(normed, tables, use_real_unbind_dim=self._unbind_dim, sequence_dim=TOKENS)
            return x

        query, key = rotated(attn.to_q, attn.norm_q), rotated(attn.to_k, attn.norm_k)
        value = attn.to_v(hidden_states).unflatten(HEADS, (attn.heads, -1))
        projection, dropout = attn.to_out
        return dropout(projection(self._peers.attention(query, key, value, num_tokens)))
