"""A tiny CLIP model."""

from tests.tiny_scorers.clip_score import settings

__all__ = ["settings"]
