"""Wan 2.1 as a velocity field."""

import torch
import torch.distributed as dist
from diffusers import WanPipeline
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._video import VideoAdapter
from cosmos_rl_core.models.wan.split import split
from cosmos_rl_core.pipelines import checkpoints


class Wan(VideoAdapter):
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds``, zero after the last token."""

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        checkpoints.check(path)
        super().__init__(_loading.load_pipeline(WanPipeline, path, components, device), path, device)

    def _encode_prompt(self, prompt: str, max_prompt_length: int) -> Conditioning:
        embeds, _ = self._pipeline.encode_prompt(
            prompt, do_classifier_free_guidance=False, max_sequence_length=max_prompt_length, device=self._device
        )
        return {"prompt_embeds": embeds[0].cpu()}

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed ``1000 t`` as float32, never a rounded number."""
        return self.transformer(
            hidden_states=x_t,
            timestep=(t * self.scheduler.config.num_train_timesteps).to(torch.float32),
            encoder_hidden_states=conditioning["prompt_embeds"],
            return_dict=False,
        )[0].float()

    def split_sequence(self, group: dist.ProcessGroup) -> None:
        """Share tokens as :func:`.split.split` does."""
        split(self.transformer, group)


def load(path: str, components: tuple[str, ...], device: torch.device) -> Wan:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Raises :class:`ConfigError` on Wan 2.2's pipelines (two stages, timesteps by token) and on image-to-video ones.
    """
    return Wan(path, components, device)
