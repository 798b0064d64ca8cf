"""Load a base model as a Request names it."""

import torch

from cosmos_rl_core import pipelines, plugins
from cosmos_rl_core.models._base import Model
from stages.contracts import ModelRef


def load_model(ref: ModelRef, components: tuple[str, ...], device: torch.device) -> Model:
    """The named components of the base pipeline, float32, frozen, on ``device``."""
    return plugins.load("models", ref.adapter).load(pipelines.resolve_path(ref.path), components, device)
