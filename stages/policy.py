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
from stages.formats.policies import write_files, write_part
from stages.training.loading import load_model


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write the part ``current``: the base's weights, fresh adapters, or fresh weights."""
    config = request.settings(contracts.Policy)
    ref, path = config.model, directories.resolve_path(config.model.path)
    if (found := directories.pipeline_digest(path)) != ref.digest:
        raise ArtifactError(
            f"the pipeline at {ref.path} differs from the planned one: digest {found}, planned {ref.digest}"
        )
    # From the base only names and shapes: the weights of a large model may not fit into one process.
    component = "transformer" if config.from_scratch else EMPTY_TRANSFORMER
    model = load_model(ref, (component,), context.ranks.device)
    if config.from_scratch:
        initialise(model.transformer, derive(request.seed, "transformer"))
    weights = prepare(model.transformer, config.lora, reference=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
    if config.from_scratch:
        write_part(context, CURRENT, tensors=weights.here(CURRENT))
    elif config.lora is not None:
        tensors = initial_lora(shapes, config.lora, derive(request.seed, "policy"))
        write_part(context, CURRENT, tensors=tensors)
    else:
        base = BaseWeights(path, shapes)
        sizes = {name: FLOAT32_BYTES * math.prod(shape) for name, shape in shapes.items()}
        write_files(context, CURRENT, sizes=sizes, whole=base.__getitem__)
    return {"trainable": sum(math.prod(shape) for shape in shapes.values())}
