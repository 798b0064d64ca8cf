"""Loading of a base model, or of a media set, that a Request names."""

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from torch import nn

from cosmos_rl_core import plugins
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets._base import Media
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.imports import loaded
from cosmos_rl_core.models import _loading
from cosmos_rl_core.models._base import Model
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.parallel import compiling, sharding
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.kept import KEPT
from cosmos_rl_core.parallel.precision import ParamDtype, half
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.pipelines import directories, guidance
from cosmos_rl_core.weights import half_weights
from cosmos_rl_core.weights.parts import CURRENT, INIT
from cosmos_rl_core.weights.policy_weights import PolicyWeights, prepare
from stages.artifacts.request import Request
from stages.contracts import ModelRef, OnPolicy
from stages.execution.context import Context
from stages.formats.policies import read_part


def load_model(ref: ModelRef, components: tuple[str, ...], device: torch.device) -> Model:
    """Load the named components of the base pipeline, float32, frozen, on ``device``."""
    path = directories.resolve_path(ref.path)
    model: Any
    if device.type == "cpu":
        model = loaded(read_model, ref.adapter, path, [*components], directories.stamp(path))
    else:
        model = plugins.load_model(ref.adapter).load(path, components, device)
    if ref.complex_human_instruction is not None:
        model.complex_human_instruction = ref.complex_human_instruction
    if ref.embedded_guidance_scale is not None:
        model.embedded_guidance_scale = ref.embedded_guidance_scale
    for option, value in guidance.stock_options(directories.spec(path), ref).items():
        setattr(model, option, value)
    return model


def read_model(adapter: str, path: str, components: Sequence[str], _stamp: str) -> Model:
    """Read components on the CPU. ``_stamp`` changes with their files, so that changed files are loaded anew."""
    return plugins.load_model(adapter).load(path, tuple(components), torch.device("cpu"))


def prompt_options(ref: ModelRef) -> dict[str, list[str]]:
    """Return the arguments of the stock pipeline's call that change how it reads prompts."""
    instruction = ref.complex_human_instruction
    return {} if instruction is None else {"complex_human_instruction": list(instruction)}


def load_stock(
    ref: ModelRef, path: str, param_dtype: ParamDtype, device: torch.device, *, references: bool = False
) -> Any:
    """Load the whole stock pipeline in ``path``, the base or an export of it, on ``device``.

    With ``references`` it is the stock pipeline that takes references. In float32 each component is read straight to
    the device, and the transformer is the stock one. A half type applies only to the transformer's matrices
    (:mod:`cosmos_rl_core.weights.half_weights`).
    """
    transformer = None if param_dtype == "float32" else half_weights.load(path, param_dtype, device)
    plugin = plugins.load_model(ref.adapter)
    if hasattr(plugin, "load_stock"):
        return plugin.load_stock(path, bool(ref.guardrail), device, transformer)
    given = {} if transformer is None else {"transformer": transformer}
    # Straight to the device: all ranks of a machine share the CPU's memory.
    reading = {"device_map": device.type}
    names = [name for name in _loading.weighted_parts(path) if name not in given]
    given |= {name: _loading.read_part(path, name, **reading) for name in names}
    # Use the pipeline's own class: DiffusionPipeline ignores a given transformer that is optional, and reads another.
    takes = directories.spec(path).references
    name = takes.pipeline_class if references and takes else directories.pipeline_class(path)
    return getattr(diffusers, name).from_pretrained(
        path, local_files_only=True, **reading, **_loading.absent(path) | given
    )


def load_media(dataset: DatasetOptions, planned: str, ranks: Group) -> Media:
    """Load the media set. Raises :class:`ArtifactError` unless ``planned`` is the digest of its files. Collective.

    One rank per machine computes the digest, because machines may hold different copies.
    """
    plugin, first = plugins.load("datasets", dataset.name), ranks.here[0]
    found = ranks.gather(plugin.digest(dataset) if ranks.rank == first else None)[first]
    if found != planned:
        raise ArtifactError(
            f"the files of the dataset {dataset.name!r} differ from the planned ones: digest {found or 'none'}, "
            f"planned {planned or 'none'}; restore them, or plan another run"
        )
    return plugin.Media(dataset)


def load_policy(
    request: Request,
    config: OnPolicy,
    *,
    components: tuple[str, ...],
    context: Context[Group],
    reference: bool,
    other: LoraConfig | None = None,
    merged: bool = False,
) -> tuple[Model, PolicyWeights]:
    """Load the model with ``components`` and its transformer, with the weights of the Request's input ``policy``.

    The weights are the part that the input names first. The input ``init`` is a frozen adapter below them. ``other``
    are the settings of an adapter of another shape, which has no weights yet.

    With ``merged``, adapters are added to the base if it computes in float32, and no part can be used afterwards.
    Velocities then differ by rounding from the update's, so the update must not replay steps of such samples.

    With sharded weights each rank reads and keeps its own rows; context-parallel peers then share the tokens of every
    forward pass.
    """
    source = request.one("policy")
    group: Group = context.ranks
    mesh = group.mesh

    def shard(transformer: nn.Module) -> Shards:
        if group.parallelism.compile:
            # Before FSDP, whose hooks must not be compiled.
            compiling.compile_blocks(transformer)
        if mesh is None:
            return WHOLE
        # Before FSDP, which cuts and gathers weights in the type that they have.
        half_weights.cast_frozen(transformer, config.param_dtype)
        offload = group.parallelism.fsdp_offload
        shards = sharding.shard(transformer, mesh, half(config.param_dtype), offload=offload)
        sharding.materialise(transformer, group.device, offload=offload)
        sharding.load_base(transformer, directories.resolve_path(config.model.path), shards)
        return shards

    transformer = "transformer" if mesh is None else EMPTY_TRANSFORMER
    with KEPT.form(config.param_dtype):
        model = load_model(config.model, (transformer, *components), group.device)
    base = model.transformer
    if config.lora is None:
        KEPT.own(base)
    weights = prepare(base, config.lora, below=config.below, other=other, reference=reference, shard=shard)
    weights.load(CURRENT, read_part(source, source.part, weights.shards, context.progress, group=group))
    if config.below is not None:
        weights.load_below(read_part(request.one(INIT), INIT, progress=context.progress, group=group))
    if mesh is None:
        half_weights.cast_frozen(model.transformer, config.param_dtype)
        KEPT.adopt(base)
    if merged and half(config.param_dtype) is None:
        # Only after the base was kept for other stages, which need it without adapters.
        weights.merge()
    if group.peers is not None:
        model.split_sequence(group.peers)
    return model, weights
