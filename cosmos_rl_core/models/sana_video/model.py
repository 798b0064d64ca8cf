"""SANA-Video as a velocity field."""

from diffusers import SanaVideoPipeline

from cosmos_rl_core.models._media import VideoModel
from cosmos_rl_core.models._sana import SanaModel


class SanaVideo(SanaModel, VideoModel):
    """SANA-Video. Conditioning: ``prompt_embeds`` and ``prompt_attention_mask``.

    Its authors end prompts with "motion score: 30."; add that in the dataset.
    """

    stock_class = SanaVideoPipeline


load = SanaVideo
