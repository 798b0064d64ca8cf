"""SANA-Video as a velocity field."""

import torch
from diffusers import SanaVideoPipeline
from torch import Tensor

from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Conditioning
from cosmos_rl_core.models._sana import TakesInstruction, velocity
from cosmos_rl_core.models._video import VideoAdapter
from cosmos_rl_core.pipelines import checkpoints


class SanaVideo(TakesInstruction, VideoAdapter):
    """See :class:`cosmos_rl_core.models._base.Model`. Conditioning: ``prompt_embeds`` and ``prompt_attention_mask``.

    Its authors end prompts with "motion score: 30."; that is for the dataset to do.
    """

    def __init__(self, path: str, components: tuple[str, ...], device: torch.device) -> None:
        checkpoints.check(path)
        super().__init__(_loading.load_pipeline(SanaVideoPipeline, path, components, device), path, device)

    def velocity(self, x_t: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The transformer is fed ``1000 t``, never a rounded number as by the stock scheduler."""
        timestep = t * self.scheduler.config.num_train_timesteps
        return velocity(self.transformer, x_t, timestep, conditioning)


def load(path: str, components: tuple[str, ...], device: torch.device) -> SanaVideo:
    """Load the named components of the pipeline directory ``path``, float32, frozen, in eval mode.

    Raises :class:`ConfigError` on another VAE than Wan's or LTX2's, and on distilled models.
    """
    return SanaVideo(path, components, device)
