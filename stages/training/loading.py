"""Load a base model, or a media set, as a Request names it."""

from typing import Any

import diffusers
import torch
from torch import nn

from cosmos_rl_core import plugins
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Media
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import EMPTY_TRANSFORMER, Model
from cosmos_rl_core.parallel import sharding
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype, half
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights import half_weights
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import PolicyWeights, prepare
from stages.artifacts.request import Input
from stages.context import Context
from stages.contracts import ModelRef, OnPolicy
from stages.formats.policies import read_part


def load_model(ref: ModelRef, components: tuple[str, ...], device: torch.device) -> Model:
    """The named components of the base pipeline, float32, frozen, on ``device``."""
    model = plugins.load_model(ref.adapter).load(directories.resolve_path(ref.path), components, device)
    if ref.complex_human_instruction is not None:
        model.complex_human_instruction = ref.complex_human_instruction
    if ref.embedded_guidance_scale is not None:
        model.embedded_guidance_scale = ref.embedded_guidance_scale
    return model


def prompt_options(ref: ModelRef) -> dict[str, list[str]]:
    """What the call of the stock pipeline is told of prompts besides them."""
    instruction = ref.complex_human_instruction
    return {} if instruction is None else {"complex_human_instruction": list(instruction)}


def load_stock(ref: ModelRef, path: str, param_dtype: ParamDtype, device: torch.device) -> Any:
    """The whole stock pipeline in ``path``, the base or an export of it, on ``device``.

    In float32 each component is read straight there, and the transformer is the stock one. In a half type that is the
    type of its matrices alone (:mod:`cosmos_rl_core.weights.half_weights`).
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
    return getattr(diffusers, directories.pipeline_class(path)).from_pretrained(
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


def load_policy(
    config: OnPolicy, source: Input, *, components: tuple[str, ...], context: Context, reference: bool
) -> tuple[Model, PolicyWeights]:
    """The model with ``components`` beside its transformer, which has ``source.part`` as its live, trainable weights.

    On ranks that share their weights, each reads and keeps its rows alone; peers then share the tokens of all that goes
    through the transformer.
    """
    group: Group = context.ranks
    mesh = group.mesh

    def spread(transformer: nn.Module) -> Shards:
        if group.parallelism.compile:
            # Before FSDP, whose hooks are not to be compiled.
            sharding.compile_blocks(transformer)
        if mesh is None:
            return WHOLE
        return sharding.spread(
            transformer,
            mesh,
            directories.resolve_path(config.model.path),
            group.device,
            compute=half(config.param_dtype),
            offload=group.parallelism.fsdp_offload,
        )

    transformer = "transformer" if mesh is None else EMPTY_TRANSFORMER
    model = load_model(config.model, (transformer, *components), group.device)
    weights = prepare(model.transformer, config.lora, reference=reference, spread=spread)
    weights.load(CURRENT, read_part(source, source.part, weights.shards, context.progress))
    if group.peers is not None:
        model.split_sequence(group.peers)
    return model, weights
