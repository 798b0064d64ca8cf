"""Names that the body of a model plugin imports. Its facts, without torch, are in ``model_facts``."""

from cosmos_rl_core.models._base import Model, guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning, Entries, generated, given_frames, stack
from cosmos_rl_core.models._encoder import Encoder
from cosmos_rl_core.models._loading import COMPONENTS, EMPTY_TRANSFORMER, GUARDRAIL, PREFIX
from cosmos_rl_core.models._media import ImageModel, NotFiniteError, VideoModel

__all__ = [
    "COMPONENTS",
    "EMPTY_TRANSFORMER",
    "GUARDRAIL",
    "PREFIX",
    "Conditioning",
    "Encoder",
    "Entries",
    "ImageModel",
    "Model",
    "NotFiniteError",
    "VideoModel",
    "generated",
    "given_frames",
    "guided_velocity",
    "stack",
]
