"""Shares the tokens of a Cosmos transformer among context-parallel peers."""

import inspect
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from cosmos_rl_core.parallel.context_parallel import HEADS, Forward, Peers, project_out, rotate


def split(transformer: Any, group: dist.ProcessGroup) -> None:
    """Share the tokens of every forward pass with the other processes of ``group``, which do the same.

    Add LoRA before. Raises :class:`ConfigError` if there are fewer heads than peers; so does a forward pass of fewer
    tokens than peers.
    """
    peers = Peers(group, transformer.config["num_attention_heads"])
    forward = Forward(peers)
    signature = inspect.signature(transformer.forward)

    def flat_timesteps(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A noise level a frame, ``[B, 1, T, 1, 1]``, as ``[B T]``: the transformer would spread it over all tokens."""
        call = signature.bind(*args, **kwargs)
        call.arguments["timestep"] = call.arguments["timestep"].flatten()
        return call.args, call.kwargs

    def own_patches(_module: nn.Module, _args: Any, patches: Tensor) -> Tensor:
        """``[B, T, H, W, C]`` to ``[B, S_own, 1, 1, C]``, which the transformer flattens to tokens."""
        forward.begin(*patches.shape[:4])
        return patches.flatten(1, 3)[:, forward.own, None, None]

    def own_positions(_module: nn.Module, _args: Any, positions: Tensor) -> Tensor:
        return positions[:, peers.own(positions.shape[1])]

    def own_times(_module: nn.Module, _args: Any, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(forward.spread(embedding) for embedding in embeddings)

    transformer.register_forward_pre_hook(flat_timesteps, with_kwargs=True)
    if transformer.learnable_pos_embed is not None:
        transformer.learnable_pos_embed.register_forward_hook(own_positions)
    transformer.patch_embed.register_forward_hook(own_patches)
    transformer.time_embed.register_forward_hook(own_times)
    for block in transformer.transformer_blocks:
        block.attn1.set_processor(_CosmosSelfAttention(peers))
    forward.join_after(transformer)


class _CosmosSelfAttention:
    """Processor of Cosmos's ``Attention``: a norm for each head; rotary tables ``[S, D]`` by halves of the channels."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        attention_mask: None,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Own tokens ``[B, S_own, C]`` to own tokens; the tables are of all."""
        num_tokens = image_rotary_emb[0].shape[0]
        tables = tuple(table[self._peers.own(num_tokens)] for table in image_rotary_emb)
        by_head = (
            project(hidden_states).unflatten(HEADS, (attn.heads, -1)) for project in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key, value = by_head
        query, key = (rotate(x, tables, unbind_dim=-2) for x in (attn.norm_q(query), attn.norm_k(key)))
        return project_out(attn, self._peers.attention(query, key, value, num_tokens))
