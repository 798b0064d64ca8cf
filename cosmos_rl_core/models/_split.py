"""Self-attention of a transformer whose tokens are shared among context-parallel peers."""

from typing import Any

from torch import Tensor

from cosmos_rl_core.parallel.context_parallel import HEADS, Peers, project_out, rotate


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

        The rotary tables, ``[S, D]`` or ``[1, S, 1, D]``, are those of all tokens.
        """
        cos, sin = (table.reshape(-1, table.shape[-1]) for table in image_rotary_emb)
        num_tokens = len(cos)
        own = self._peers.own(num_tokens)

        def rotated(projection: Any, norm: Any) -> Tensor:
            x = projection(hidden_states)
            by_head = x.unflatten(HEADS, (attn.heads, -1))
            normed = norm(by_head) if self._norms_heads else norm(x).unflatten(HEADS, (attn.heads, -1))
            return rotate(normed, (cos[own], sin[own]), unbind_dim=self._unbind_dim)

        query, key = rotated(attn.to_q, attn.norm_q), rotated(attn.to_k, attn.norm_k)
        value = attn.to_v(hidden_states).unflatten(HEADS, (attn.heads, -1))
        return project_out(attn, self._peers.attention(query, key, value, num_tokens))
