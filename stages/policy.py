"""Policy version 0, and how every version lies on disk: ``<part>/<n>.safetensors``, cut by name and size alone."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from cosmos_rl_core import pipelines, sharding
from cosmos_rl_core.base_weights import BaseWeights
from cosmos_rl_core.context_parallel import split_sequence
from cosmos_rl_core.distributed import Group
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._base import EMPTY_TRANSFORMER, Model
from cosmos_rl_core.models._loading import initialise
from cosmos_rl_core.policy_weights import PolicyWeights, cut, initial_lora, prepare, to_bytes
from cosmos_rl_core.precision import half
from cosmos_rl_core.seeds import derive
from cosmos_rl_core.sharding import WHOLE, Shards
from cosmos_rl_core.sizes import FLOAT32_BYTES
from cosmos_rl_core.tensor_files import read_tensors
from cosmos_rl_core.tensor_headers import Readable
from cosmos_rl_core.weights.parts import CURRENT
from stages import contracts
from stages.artifacts import Artifact
from stages.context import Context
from stages.contracts import Input, ModelRef, OnPolicy, Request
from stages.files import scan
from stages.loading import load_model


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write the part ``current``: the base's weights, fresh adapters on it, or fresh weights altogether."""
    config = request.config
    assert isinstance(config, contracts.Policy)
    _check_base(config.model)
    if config.from_scratch:
        model = load_model(config.model, ("transformer",), context.ranks.device)
        initialise(model.transformer, derive(request.seed, "transformer"))
    else:
        # A large model's weights are more than one process may hold: here are their names and shapes alone.
        model = load_model(config.model, (EMPTY_TRANSFORMER,), context.ranks.device)
    weights = prepare(model.transformer, config.lora, reference=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
    if config.from_scratch:
        write_part(context, CURRENT, tensors=weights.here(CURRENT), group=context.ranks)
    elif config.lora is not None:
        tensors = initial_lora(shapes, config.lora, derive(request.seed, "policy"))
        write_part(context, CURRENT, tensors=tensors, group=context.ranks)
    else:
        base = BaseWeights(pipelines.resolve_path(config.model.path), shapes)
        sizes = {name: FLOAT32_BYTES * math.prod(shape) for name, shape in shapes.items()}
        _write_files(context, CURRENT, sizes=sizes, whole=base.__getitem__, group=context.ranks)
    return {"trainable": sum(math.prod(shape) for shape in shapes.values())}


def _check_base(ref: ModelRef) -> None:
    found = pipelines.pipeline_digest(pipelines.resolve_path(ref.path))
    if found != ref.digest:
        raise ArtifactError(
            f"the pipeline at {ref.path} is not the one that was planned: digest {found}, planned {ref.digest}"
        )


def write_part(
    context: Context, part: str, *, tensors: Mapping[str, Tensor], group: Group, shards: Shards = WHOLE
) -> None:
    """Write one part's files, each gathered whole by all ranks and written by one of them; all ranks call this."""
    sizes = {name: math.prod(shards.shape(name, tensor)) * tensor.element_size() for name, tensor in tensors.items()}
    _write_files(context, part, sizes=sizes, whole=lambda name: shards.whole(name, tensors[name]), group=group)


def _write_files(
    context: Context, part: str, *, sizes: Mapping[str, int], whole: Callable[[str], Tensor], group: Group
) -> None:
    """Write the files in rounds of one file a rank, so that all ranks write at the same time.

    Gathering is collective: a rank that wrote its file first would keep the others waiting. A rank holds one file.
    """
    files = list(enumerate(cut(sizes)))
    for first in range(0, len(files), group.world_size):
        mine: tuple[int, dict[str, Tensor]] | None = None
        for index, names in files[first : first + group.world_size]:
            context.progress(f"writing {part}", index, len(files))
            tensors = {name: whole(name) for name in names}
            if index % group.world_size == group.rank:
                mine = index, tensors
        if mine is not None:
            index, tensors = mine
            context.attempt.put(f"{part}/{index:05d}.safetensors", to_bytes(tensors))
    context.progress(f"writing {part}", len(files), len(files))


Progress = Callable[[str, int, int], None]
"""Told a phase, a step of it and how many it has, as :meth:`stages.runner.Context.progress`."""


def read_part(
    source: Input, part: str, shards: Shards = WHOLE, progress: Progress = lambda *_: None
) -> dict[str, Tensor]:
    """One part's tensors, on the CPU; empty if the policy has no such part. Of what is cut, this rank's rows alone:
    besides them, memory holds one whole tensor at a time. ``progress`` is told of every tensor, the files as steps."""
    artifact = Artifact(source)
    tensors: dict[str, Tensor] = {}
    names = artifact.names(f"{part}/")

    def take(stream: Readable, index: int) -> None:
        for key, tensor in read_tensors(stream):
            # A copy of the rows, so that the tensor's others go.
            tensors[key] = shards.local(key, tensor).clone() if shards.cuts(key) else tensor
            progress(f"reading {part}", index, len(names))

    for index, name in enumerate(names):
        scan(artifact.url, artifact.entry(name), partial(take, index=index))
        progress(f"reading {part}", index + 1, len(names))
    return tensors


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
            pipelines.resolve_path(config.model.path),
            group.device,
            compute=half(config.param_dtype),
            offload=group.parallelism.fsdp_offload,
        )

    transformer = "transformer" if mesh is None else EMPTY_TRANSFORMER
    model = load_model(config.model, (transformer, *components), group.device)
    weights = prepare(model.transformer, config.lora, reference=reference, spread=spread)
    weights.load(CURRENT, read_part(source, source.part, weights.shards, context.progress))
    if group.peers is not None:
        split_sequence(model.transformer, group.peers)
    return model, weights
