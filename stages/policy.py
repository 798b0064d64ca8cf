"""Policy version 0: the base's weights, fresh adapters on it, fresh weights, or weights that were trained before."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER, initialise
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.pipelines.base_weights import BaseWeights
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES
from cosmos_rl_core.seeds import derive
from cosmos_rl_core.weights.parts import CURRENT, INIT, REFERENCE
from cosmos_rl_core.weights.policy_weights import initial_lora, prepare
from stages import contracts
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.policies import write_files, write_part
from stages.training.inits import reader_of
from stages.training.loading import load_model

Shapes = dict[str, tuple[int, ...]]


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write the part ``current``: the base's weights, fresh adapters, fresh weights, or an init's.

    An init that the adapters are stacked on becomes the part ``init``. With ``keeps_base`` the base becomes the part
    ``reference``. Raises :class:`ArtifactError` if the pipeline's files differ from the planned ones.
    """
    config = request.settings(contracts.Policy)
    ref, path, init = config.model, directories.resolve_path(config.model.path), config.init
    if (found := directories.pipeline_digest(path)) != ref.digest:
        raise ArtifactError(
            f"the pipeline at {ref.path} differs from the planned one: digest {found}, planned {ref.digest}; restore "
            "its files, or plan another run"
        )
    # Only names and shapes come from the base: the weights of a large model may not fit into one process.
    component = "transformer" if config.from_scratch else EMPTY_TRANSFORMER
    model = load_model(ref, (component,), context.ranks.device)
    if config.from_scratch:
        initialise(model.transformer, derive(request.seed, "transformer"))
    below = init.lora if init is not None and config.stacked else None
    weights = prepare(model.transformer, config.lora, below=below, reference=False)
    shapes = {name: tuple(parameter.shape) for name, parameter in weights.parameters.items()}
    if config.from_scratch:
        write_part(context, CURRENT, tensors=weights.here(CURRENT))
    elif init is not None and not config.stacked:
        _write(context, CURRENT, shapes, reader_of(request, init, shapes))
    elif config.lora is not None:
        tensors = initial_lora(shapes, config.lora, derive(request.seed, "policy"))
        write_part(context, CURRENT, tensors=tensors)
    else:
        _write(context, CURRENT, shapes, BaseWeights(path, shapes).__getitem__)
    if init is not None and config.stacked:
        frozen = {name: tuple(parameter.shape) for name, parameter in weights.below.items()}
        _write(context, INIT, frozen, reader_of(request, init, frozen))
    if config.keeps_base:
        base = BaseWeights(path, shapes).__getitem__ if config.lora is None else _zeros(shapes)
        _write(context, REFERENCE, shapes, base)
    began = {} if init is None else {"init": f"{init.source} ({init.digest[:12]})"}
    return {"trainable": sum(math.prod(shape) for shape in shapes.values())} | began


def _write(context: Context[Group], part: str, shapes: Shapes, whole: Callable[[str], Tensor]) -> None:
    sizes = {name: FLOAT32_BYTES * math.prod(shape) for name, shape in shapes.items()}
    write_files(context, part, sizes=sizes, whole=whole)


def _zeros(shapes: Shapes) -> Callable[[str], Tensor]:
    """Return a function that gives zeros for the name of a tensor: the weights of an adapter that adds nothing."""
    return lambda name: torch.zeros(shapes[name], dtype=torch.float32, device="cpu")
