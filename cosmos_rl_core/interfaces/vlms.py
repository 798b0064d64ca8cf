"""Names that a VLM plugin imports: its processor, settings of inputs and patches. Without torch."""

from cosmos_rl_core.vlms._base import Changes, Clip, Kind, Module, Processor, Visual, WeightShapes
from cosmos_rl_core.vlms._media import Source
from cosmos_rl_core.vlms._patches import MAX_ASPECT_RATIO, patches, smart_size
from cosmos_rl_core.vlms._settings import STEPS, ImageSettings, Size, VideoSettings, read_settings

__all__ = [
    "MAX_ASPECT_RATIO",
    "STEPS",
    "Changes",
    "Clip",
    "ImageSettings",
    "Kind",
    "Module",
    "Processor",
    "Size",
    "Source",
    "VideoSettings",
    "Visual",
    "WeightShapes",
    "patches",
    "read_settings",
    "smart_size",
]
