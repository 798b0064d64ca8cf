"""The parts that pipelines of Wan share: UMT5's text and context parallelism."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from cosmos_rl_core.models._conditioning import Entries
from cosmos_rl_core.models._media import VideoModel
from cosmos_rl_core.parallel.context_parallel import Peers, SelfAttention


class WanModel(VideoModel):
    """A model of Wan's family. Conditioning: ``prompt_embeds``, zero after the last token."""

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Entries:
        embeds, _ = self.pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_prompt_length, device=self._device
        )
        return {"prompt_embeds": embeds[0].cpu()}

    def split_sequence(self, group: dist.ProcessGroup) -> None:
        """Share tokens with :func:`split`."""
        split(self.transformer, group)


def split(transformer: Any, group: dist.ProcessGroup) -> None:
    """Share the tokens of every forward pass among the processes of ``group``. All of them call this, after LoRA.

    Raises :class:`ConfigError` if there are fewer attention heads than peers. A forward pass raises it if there are
    fewer tokens than peers.
    """
    peers = Peers(group, transformer.config["num_attention_heads"])

    def own_patches(_module: nn.Module, _args: Any, patches: Tensor) -> Tensor:
        """Cut ``[B, C, T, H, W]`` to ``[B, C, S_own]``, which the transformer's own flattening does not change."""
        batch, _, *grid = patches.shape
        peers.begin(batch, *grid)
        return patches.flatten(2)[..., peers.own()]

    def own_modulation(_module: nn.Module, _args: Any, embeddings: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cut time embeddings if there is one for each token, ``[B, S, C]``.

        Time embeddings of samples, ``[B, C]``, and the text's embeddings stay whole.
        """
        time, projected_time, *text = embeddings
        if time.ndim == 3:
            time, projected_time = time[:, peers.own()], projected_time[:, peers.own()]
        return time, projected_time, *text

    transformer.patch_embedding.register_forward_hook(own_patches)
    transformer.condition_embedder.register_forward_hook(own_modulation)
    for block in transformer.blocks:
        block.attn1.set_processor(SelfAttention(peers, norms_heads=False, unbind_dim=-1))
    peers.join_after(transformer)
