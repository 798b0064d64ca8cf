"""Load a base model, or a media set, as a Request names it."""

from typing import Any

import diffusers
import torch

from cosmos_rl_core import half_weights, pipelines, plugins
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Media
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.precision import ParamDtype
from stages.contracts import ModelRef


def load_model(ref: ModelRef, components: tuple[str, ...], device: torch.device) -> Model:
    """The named components of the base pipeline, float32, frozen, on ``device``."""
    model = plugins.load_model(ref.adapter).load(pipelines.resolve_path(ref.path), components, device)
    if ref.complex_human_instruction is not None:
        model.complex_human_instruction = ref.complex_human_instruction
    return model


def prompt_options(ref: ModelRef) -> dict[str, list[str]]:
    """What the call of the stock pipeline is told of prompts besides them."""
    instruction = ref.complex_human_instruction
    return {} if instruction is None else {"complex_human_instruction": list(instruction)}


def load_stock(ref: ModelRef, path: str, param_dtype: ParamDtype, device: torch.device) -> Any:
    """The whole stock pipeline in ``path``, the base or an export of it, on ``device``.

    In float32 each component is read straight there, and the transformer is the stock one. In a half type that is the
    type of its matrices alone (:mod:`cosmos_rl_core.half_weights`).
    """
    transformer = None if param_dtype == "float32" else half_weights.load(path, param_dtype, device)
    plugin = plugins.load_model(ref.adapter)
    if hasattr(plugin, "load_stock"):
        return plugin.load_stock(path, bool(ref.guardrail), device, transformer)
    given = {} if transformer is None else {"transformer": transformer}
    # Not by way of the CPU's memory, which all ranks of a machine share.
    reading = {"device_map": device.type}
    names = [name for name in _loading.weighted_parts(path) if name not in given]
    given |= {name: _loading.read_part(path, name, **reading) for name in names}
    # By its own class: DiffusionPipeline's passes over a given transformer that may be left out, and reads another.
    return getattr(diffusers, pipelines.pipeline_class(path)).from_pretrained(
        path, local_files_only=True, **reading, **_loading.absent(path) | given
    )


def load_media(dataset: DatasetOptions, planned: str) -> Media:
    """The media set. Raises :class:`ArtifactError` unless ``planned`` is the digest of the files that it reads."""
    plugin = plugins.load("datasets", dataset.name)
    if (found := plugin.digest(dataset)) != planned:
        raise ArtifactError(
            f"the files of the dataset {dataset.name!r} are not those that were planned: digest {found or 'none'}, "
            f"planned {planned or 'none'}; restore them, or plan another run"
        )
    return plugin.Media(dataset)
