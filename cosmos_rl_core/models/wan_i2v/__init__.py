"""Wan 2.1 I2V: text and a picture to video. The transformer takes the picture's latents and CLIP's embeddings of it.

Its 36 input channels are 16 of the state, 4 of a mask and 16 of a condition: the latents of a video that begins with
the picture and goes on with grey frames.
"""

from collections.abc import Mapping
from dataclasses import replace

from cosmos_rl_core.models._wan_spec import WAN
from cosmos_rl_core.pipelines.spec import References, Settings

FRAMES_OF_A_LATENT = 4
"""Channels of the mask: one for each frame of a latent frame."""
CONDITION, PICTURE_EMBEDS = "condition", "picture_embeds"
"""Names of shared entries, float32: the mask, then the latents of the picture and grey frames, ``[20, T, H, W]``; and
CLIP's embeddings of the picture, ``[257, image_dim]``, if the transformer takes them."""
_CLIP_TOKENS = 257


def _entries(transformer: Settings, latents: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the shared entries that a picture adds, by name. ``latents`` is the shape of the latents."""
    found: dict[str, tuple[int, ...]] = {CONDITION: (FRAMES_OF_A_LATENT + latents[0], *latents[1:])}
    if (width := transformer["image_dim"]) is not None:
        found[PICTURE_EMBEDS] = (_CLIP_TOKENS, width)
    return found


SPEC = replace(
    WAN,
    pipeline_classes=("WanImageToVideoPipeline",),
    transformer_defaults={**WAN.transformer_defaults, "image_dim": None},
    refused_settings={
        **WAN.refused_settings,
        "expand_timesteps": "the 5B model of Wan 2.2, which takes a picture as a WanPipeline",
        "pos_embed_seq_len": "a model of first and last frames",
    },
    mask_channels=FRAMES_OF_A_LATENT + 16,
    # Of the tokens of picture and text, the transformer always takes the last 512 for the text.
    prompt_length=512,
    references=References(fewest=1, pipeline_class="WanImageToVideoPipeline", takes_list=False, entries=_entries),
)
