"""Policy version 0, and how every version lies on disk: ``<part>/<n>.safetensors``, cut by name and size alone."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from cosmos_rl_core import pipelines, sharding
from cosmos_rl_core.distributed import Group
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._base import EMPTY_TRANSFORMER, Model
from cosmos_rl_core.models._loading import initialise
from cosmos_rl_core.policy_weights import CURRENT, PolicyWeights, cut, from_bytes, initial_lora, prepare, to_bytes
from cosmos_rl_core.precision import half
from cosmos_rl_core.seeds import derive
from cosmos_rl_core.sharding import WHOLE, Shards
from stages import contracts
from stages.artifacts import Artifact, Attempt
from stages.contracts import Input, ModelRef, OnPolicy, Request
from stages.loading import load_model
from stages.runner import Context


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write the part ``current``: the base's weights, fresh adapters on it, or fresh weights altogether."""
    config = request.config
    assert isinstance(config, contracts.Policy)
    _check_base(config.model)
    model = load_model(config.model, ("transformer",), context.ranks.device)
    if config.from_scratch:
        initialise(model.transformer, derive(request.seed, "transformer"))
    weights = prepare(model.transformer, config.lora, reference=False)
    if config.lora is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
        weights.load(CURRENT, initial_lora(shapes, config.lora, derive(request.seed, "policy")))
    write_part(context.attempt, CURRENT, weights.get(CURRENT), context.ranks)
    return {"trainable": sum(parameter.numel() for parameter in weights.parameters.values())}


def _check_base(ref: ModelRef) -> None:
    found = pipelines.pipeline_digest(pipelines.resolve_path(ref.path))
    if found != ref.digest:
        raise ArtifactError(
            f"the pipeline at {ref.path} is not the one that was planned: digest {found}, planned {ref.digest}"
        )


def write_part(
    attempt: Attempt, part: str, tensors: Mapping[str, Tensor], group: Group, shards: Shards = WHOLE
) -> None:
    """Write one part's files, each gathered whole and written by one of the ranks, in turn; all ranks call this."""
    shapes = {name: shards.shape(name, tensor) for name, tensor in tensors.items()}
    sizes = {name: math.prod(shapes[name]) * tensors[name].element_size() for name in shapes}
    for index, names in enumerate(cut(sizes)):
        whole = {name: shards.whole(name, tensors[name]) for name in names}
        if index % group.world_size == group.rank:
            attempt.put(f"{part}/{index:05d}.safetensors", to_bytes(whole))


def read_part(source: Input, part: str, shards: Shards = WHOLE) -> dict[str, Tensor]:
    """One part's tensors, on the CPU; empty if the policy has no such part. Of what is cut, this rank's rows alone."""
    artifact = Artifact(source)
    tensors: dict[str, Tensor] = {}
    for name in artifact.names(f"{part}/"):
        # A copy of the rows, so that the file's other bytes go.
        tensors |= {
            key: shards.local(key, tensor).clone() if shards.cuts(key) else tensor
            for key, tensor in from_bytes(artifact.read(name)).items()
        }
    return tensors


def load_policy(
    config: OnPolicy, components: tuple[str, ...], source: Input, group: Group, *, reference: bool
) -> tuple[Model, PolicyWeights]:
    """The model with ``components`` beside its transformer, which has ``source.part`` as its live, trainable weights.

    On ranks that share their weights, each reads and keeps its rows alone.
    """
    ref, lora, mesh = config.model, config.lora, group.mesh
    if mesh is None:
        model = load_model(ref, ("transformer", *components), group.device)
        weights = prepare(model.transformer, lora, reference=reference)
    else:
        model = load_model(ref, (EMPTY_TRANSFORMER, *components), group.device)
        folder = Path(pipelines.resolve_path(ref.path), "transformer")
        spread = partial(
            sharding.spread,
            mesh=mesh,
            folder=folder,
            device=group.device,
            compute=half(config.param_dtype),
            offload=group.offload,
        )
        weights = prepare(model.transformer, lora, reference=reference, spread=spread)
    weights.load(CURRENT, read_part(source, source.part, weights.shards))
    return model, weights
