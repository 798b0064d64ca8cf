"""Names that a captioner plugin imports."""

from cosmos_rl_core.captioners._base import Captioner, Medium, RefusedError

__all__ = ["Captioner", "Medium", "RefusedError"]
