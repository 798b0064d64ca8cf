"""Policy version 0 of a VLM: the trainable weights of the base, or fresh adapters."""

import math
from typing import Any

from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.seeds import derive
from cosmos_rl_core.weights.parts import CURRENT
from cosmos_rl_core.weights.policy_weights import initial_lora
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.policies import write_part
from stages.vlm.contracts import VlmPolicy
from stages.vlm.loading import load, prompts_of


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write the part ``current``. Return the number of its weights, ``trainable``."""
    config = request.settings(VlmPolicy)
    _, weights = load(config, prompts_of(config.vlm), context, "float32")
    tensors = {name: parameter.detach().cpu() for name, parameter in weights.parameters.items()}
    if config.lora is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        tensors = initial_lora(shapes, config.lora, derive(request.seed, "policy"))
    write_part(context, CURRENT, tensors=tensors)
    return {"trainable": sum(math.prod(tensor.shape) for tensor in tensors.values())}
