"""Names that a dataset plugin imports: its options, prompts and media, and the protocols that it may have."""

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import (
    Item,
    ItemError,
    Media,
    MediaPlugin,
    Picture,
    Prompt,
    Reference,
    Source,
    prompt_id,
)

__all__ = [
    "DatasetOptions",
    "Item",
    "ItemError",
    "Media",
    "MediaPlugin",
    "Picture",
    "Prompt",
    "Reference",
    "Source",
    "prompt_id",
]
