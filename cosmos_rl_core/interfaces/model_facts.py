"""Names that the facts of a model plugin import: its spec, and common parts of one. Without torch."""

from cosmos_rl_core.models._vaes import KL_VAE, WAN_VAE
from cosmos_rl_core.pipelines.spec import (
    Geometry,
    ModelSpec,
    References,
    Settings,
    Vae,
    falling_sigmas,
    linear_shift,
    patch_size,
    rope_positions,
)

__all__ = [
    "KL_VAE",
    "WAN_VAE",
    "Geometry",
    "ModelSpec",
    "References",
    "Settings",
    "Vae",
    "falling_sigmas",
    "linear_shift",
    "patch_size",
    "rope_positions",
]
