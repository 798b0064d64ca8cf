"""Shares the tokens of a Wan transformer among context-parallel peers."""

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

    def own_patches(_module: nn.Module, _args: Any, patches: Tensor) -> Tensor:
        """``[B, C, T, H, W]`` to ``[B, C, S_own]``, which the transformer's own flattening leaves as it is."""
        batch, _, *grid = patches.shape
        forward.begin(batch, *grid)
        return patches.flatten(2)[..., forward.own]

    def own_modulation(_module: nn.Module, _args: Any, embeddings: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Time embeddings ``[B, C]`` are for all tokens, ``[B, S, C]`` for one each; then those of the text."""
        time, projected_time, *text = embeddings
        if time.ndim == 3:
            time, projected_time = time[:, forward.own], projected_time[:, forward.own]
        return time, projected_time, *text

    transformer.patch_embedding.register_forward_hook(own_patches)
    transformer.condition_embedder.register_forward_hook(own_modulation)
    for block in transformer.blocks:
        block.attn1.set_processor(_WanSelfAttention(peers))
    forward.join_after(transformer)


class _WanSelfAttention:
    """Processor of a ``WanAttention``: one norm over all heads; rotary tables ``[1, S, 1, D]`` by pairs of channels."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None,
        attention_mask: None,
        rotary_emb: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Own tokens ``[B, S_own, C]`` to own tokens; the tables are of all."""
        num_tokens = rotary_emb[0].shape[1]
        tables = tuple(table[0, self._peers.own(num_tokens), 0] for table in rotary_emb)
        projected = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        query, key = (rotate(x.unflatten(HEADS, (attn.heads, -1)), tables, unbind_dim=-1) for x in projected)
        value = attn.to_v(hidden_states).unflatten(HEADS, (attn.heads, -1))
        return project_out(attn, self._peers.attention(query, key, value, num_tokens))
