"""Context parallelism: the peers of a process group share the tokens of each video.

A model that supports it has a function ``split`` in its ``model.py``, made of the parts here.

Each peer calls the transformer with the same full latents, timesteps and text, and gets the same full output, bit for
bit. In between it computes its own tokens: they are cut after the patch embedding and joined after the last projection.
Self-attention goes from own tokens with all heads to all tokens with own heads and back, by one all-to-all each way;
everything else looks at single tokens, cross-attention at the whole text. Neither tokens nor heads must divide evenly:
shares differ by at most one, nothing is padded and nothing masked. Source: DeepSpeed-Ulysses, arXiv:2309.14509.

**Gradients are partial sums.** Every peer computes the same loss from the full output. The join then hands back the
gradient of the peer's own tokens alone, so that every parameter's gradient (also of embeddings of text and time, which
each peer computes in full) is what the own tokens contribute: the plain sum over the peers, no mean, is the gradient of
one process. So is that of the inputs. The loss itself must be counted once, not once a peer.

All peers must make the same calls in the same order, forward and backward. Checkpointed blocks repeat their own
all-to-alls in the backward pass, which know the number of tokens from the rotary tables and nothing from outside.
"""

from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from cosmos_rl_core.parallel.sequence_shares import shares

Axis = tuple[int, list[int]]
"""A dimension, and how much of it each peer has."""

TOKENS, HEADS = 1, 2
"""Dimensions of queries, keys and values, ``[B, S, H, D]``."""


class Peers:
    """This process among those that share a sequence."""

    def __init__(self, group: dist.ProcessGroup, num_heads: int) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._heads: Axis = (HEADS, shares("attention heads", num_heads, self.size))

    def own(self, num_tokens: int) -> slice:
        """Which of all tokens are its own."""
        sizes = shares("tokens", num_tokens, self.size)
        start = sum(sizes[: self.rank])
        return slice(start, start + sizes[self.rank])

    def attention(self, query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> Tensor:
        """Attention of own tokens to all ``num_tokens``: ``[B, S_own, H, D]`` each to ``[B, S_own, H D]``."""
        tokens: Axis = (TOKENS, shares("tokens", num_tokens, self.size))
        own_tokens = torch.cat([_as_in_kernel(x) for x in (query, key, value)])
        own_heads = _Exchange.apply(own_tokens, self._heads, tokens, self.group)
        attended = dispatch_attention_fn(*own_heads.chunk(3))
        return _Exchange.apply(attended, tokens, self._heads, self.group).flatten(HEADS).type_as(query)

    def join(self, own: Tensor, num_tokens: int) -> Tensor:
        """All tokens, from everybody's own: ``[B, S_own, C]`` to ``[B, S, C]``."""
        return _Join.apply(own, (TOKENS, shares("tokens", num_tokens, self.size)), self.group)


class _Exchange(torch.autograd.Function):
    """Cut along one axis, a part for each peer, and join what comes from them along another; and back the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Axis, joined: Axis, group: dist.ProcessGroup) -> Tensor:
        ctx.cut, ctx.joined, ctx.group = cut, joined, group
        return _exchange(x, cut, joined, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.joined, ctx.cut, ctx.group), None, None, None


class _Join(torch.autograd.Function):
    """Everybody's own parts of an axis as one; the gradient of the own part comes back, as it is."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, group: dist.ProcessGroup) -> Tensor:
        ctx.axis, ctx.rank = axis, dist.get_rank(group)
        dim, sizes = axis
        # All-gather takes equal shares only; so one copy goes to each peer, along a new first axis.
        copies = own.unsqueeze(0).expand(len(sizes), *own.shape)
        return _exchange(copies, (0, [1] * len(sizes)), (dim + 1, sizes), group).squeeze(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        dim, sizes = ctx.axis
        return gradients[0].split(sizes, dim)[ctx.rank], None, None


def _exchange(x: Tensor, cut: Axis, joined: Axis, group: dist.ProcessGroup) -> Tensor:
    """What peers have to exchange, as one all-to-all of uneven parts."""
    (cut_dim, cut_sizes), (joined_dim, joined_sizes) = cut, joined
    sent = [part.reshape(-1) for part in x.split(cut_sizes, cut_dim)]
    shape = list(x.shape)
    shape[cut_dim] = cut_sizes[dist.get_rank(group)]
    shapes = [torch.Size([*shape[:joined_dim], size, *shape[joined_dim + 1 :]]) for size in joined_sizes]
    counts = [shape.numel() for shape in shapes]
    received = x.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(sent), counts, [part.numel() for part in sent], group=group)
    parts = zip(received.split(counts), shapes, strict=True)
    return torch.cat([part.view(shape) for part, shape in parts], joined_dim)


def _as_in_kernel(x: Tensor) -> Tensor:
    """As autocast would hand it to attention anyway: in half the bytes where a norm has made it float32."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def rotate(x: Tensor, tables: tuple[Tensor, ...], unbind_dim: int) -> Tensor:
    """Rotary embedding of own tokens by the own rows ``[S_own, D]`` of the tables."""
    rotated: Any = apply_rotary_emb(x, tables, use_real_unbind_dim=unbind_dim, sequence_dim=TOKENS)  # pyright: ignore[reportArgumentType]
    return rotated


def project_out(attn: Any, attended: Tensor) -> Tensor:
    projection, dropout = attn.to_out
    return dropout(projection(attended))


class Forward:
    """The grid of patches of the forward pass under way: what hooks outside the blocks tell each other."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.batch, self.frames, self.tokens_per_frame = 0, 0, 0

    def begin(self, batch: int, frames: int, height: int, width: int) -> None:
        """Called where the patches are made."""
        self.batch, self.frames, self.tokens_per_frame = batch, frames, height * width

    @property
    def num_tokens(self) -> int:
        """Of one sample, on all peers together."""
        return self.frames * self.tokens_per_frame

    @property
    def own(self) -> slice:
        """Which of them are this peer's."""
        return self.peers.own(self.num_tokens)

    def spread(self, by_frame: Tensor) -> Tensor:
        """What is the same in a frame, ``[B T, C]``, for each own token: ``[B, S_own, C]``; ``[B, C]`` as it is."""
        if len(by_frame) == self.batch:
            return by_frame
        own, per_frame = self.own, self.tokens_per_frame
        first, last = own.start // per_frame, -(-own.stop // per_frame)
        frames = by_frame.view(self.batch, self.frames, 1, -1)[:, first:last]
        tokens = frames.expand(-1, -1, per_frame, -1).flatten(1, 2)
        return tokens[:, own.start - first * per_frame : own.stop - first * per_frame]

    def join_after(self, transformer: Any) -> None:
        """Join the tokens after the last projection. Raises if another module has come in its place since."""
        joined = transformer.proj_out

        def check(_module: nn.Module, _args: Any) -> None:
            if transformer.proj_out is not joined:
                raise RuntimeError("proj_out was replaced after the split: add LoRA first, then split")

        transformer.register_forward_pre_hook(check)
        joined.register_forward_hook(lambda _module, _args, own: self.peers.join(own, self.num_tokens))
