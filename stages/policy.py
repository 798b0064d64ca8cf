"""Policy version 0: the base's weights, fresh adapters on it, or fresh weights."""

import math
from typing import Any

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER, initialise
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES
from cosmos_rl_core.seeds import derive
from cosmos_rl_core.weights.base_weights import BaseWeights
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import initial_lora, prepare
from stages import contracts
from stages.artifacts.request import Request
from stages.context import Context
from stages.contracts import ModelRef
from stages.formats.policies import write_files, write_part
from stages.training.loading import load_model


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write the part ``current``: the base's weights, fresh adapters, or fresh weights."""
    config = request.settings(contracts.Policy)
    _check_base(config.model)
    if config.from_scratch:
        model = load_model(config.model, ("transformer",), context.ranks.device)
        initialise(model.transformer, derive(request.seed, "transformer"))
    else:
        # Names and shapes alone: the weights of a large model may not fit into one process.
        model = load_model(config.model, (EMPTY_TRANSFORMER,), context.ranks.device)
    weights = prepare(model.transformer, config.lora, reference=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
    if config.from_scratch:
        write_part(context, CURRENT, tensors=weights.here(CURRENT), group=context.ranks)
    elif config.lora is not None:
        tensors = initial_lora(shapes, config.lora, derive(request.seed, "policy"))
        write_part(context, CURRENT, tensors=tensors, group=context.ranks)
    else:
        base = BaseWeights(directories.resolve_path(config.model.path), shapes)
        sizes = {name: FLOAT32_BYTES * math.prod(shape) for name, shape in shapes.items()}
        write_files(context, CURRENT, sizes=sizes, whole=base.__getitem__, group=context.ranks)
    return {"trainable": sum(math.prod(shape) for shape in shapes.values())}


def _check_base(ref: ModelRef) -> None:
    found = directories.pipeline_digest(directories.resolve_path(ref.path))
    if found != ref.digest:
        raise ArtifactError(
            f"the pipeline at {ref.path} differs from the planned one: digest {found}, planned {ref.digest}"
        )
