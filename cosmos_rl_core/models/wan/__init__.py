"""Wan 2.1, and the 5B model of Wan 2.2: text to video, one text encoder, 5-D latents of a causal video VAE.

The model of Wan 2.2 also takes a picture, which is the first frame of the video.
"""

from dataclasses import replace

from cosmos_rl_core.models._wan_spec import WAN
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS, CONDITIONAL_MASK, References

SPEC = replace(
    WAN,
    references=References(
        when=lambda index: bool(index.get("expand_timesteps")),
        pipeline_class="WanImageToVideoPipeline",
        takes_list=False,
        entries=lambda _, latents: {CONDITIONAL_LATENTS: latents, CONDITIONAL_MASK: (1, latents[1], 1, 1)},
    ),
)
