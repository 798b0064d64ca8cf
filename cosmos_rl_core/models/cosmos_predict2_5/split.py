"""Context parallelism of a Cosmos transformer."""

import inspect
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from cosmos_rl_core.models._split import SelfAttention
from cosmos_rl_core.parallel.context_parallel import Forward, Peers


def split(transformer: Any, group: dist.ProcessGroup) -> None:
    """Share the tokens of every forward pass among the processes of ``group``. All of them call this, after LoRA.

    Raises :class:`ConfigError` if there are fewer heads than peers. A forward pass raises it if there are fewer tokens
    than peers.
    """
    peers = Peers(group, transformer.config["num_attention_heads"])
    forward = Forward(peers)
    signature = inspect.signature(transformer.forward)

    def flat_timesteps(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Flatten noise levels of frames, ``[B, 1, T, 1, 1]``, to ``[B T]``: these are not repeated for all tokens."""
        call = signature.bind(*args, **kwargs)
        call.arguments["timestep"] = call.arguments["timestep"].flatten()
        return call.args, call.kwargs

    def own_patches(_module: nn.Module, _args: Any, patches: Tensor) -> Tensor:
        """Cut ``[B, T, H, W, C]`` to ``[B, S_own, 1, 1, C]``, which the transformer flattens to tokens."""
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
        block.attn1.set_processor(SelfAttention(peers, norms_heads=True, unbind_dim=-2))
    forward.join_after(transformer)
