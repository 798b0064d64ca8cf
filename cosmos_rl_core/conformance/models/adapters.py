"""Models, loaded by the plugins whose specs name the classes of their pipelines."""

from pathlib import Path
from types import ModuleType

import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.pipelines import directories


def adapter_of(folder: str | Path) -> ModuleType:
    """Return the ``model.py`` of the plugin that reads a pipeline directory."""
    return plugins.load_model(directories.adapter_name(folder))


def load_model(folder: str | Path, components: tuple[str, ...], device: torch.device) -> Model:
    """Return the model of a pipeline directory with these components."""
    return adapter_of(folder).load(str(folder), components, device)
