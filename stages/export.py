"""The policy in diffusers' own layout, with the averaged weights if there are any."""

from typing import Any

from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights.export import full_pipeline, lora_files
from cosmos_rl_core.weights.joined import Joined
from cosmos_rl_core.weights.parts import INIT
from stages import contracts
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.formats.sample_tensors import part_tensors


def run(request: Request, context: Context[Ranks]) -> dict[str, Any]:
    """Write ``lora/model.safetensors`` and ``lora/adapter_config.json``, or a whole pipeline under ``pipeline/``.

    An adapter that is stacked on a frozen one is joined with it to one adapter, which has the sum of both ranks.

    Tensors are streamed one at a time: memory holds a few times the largest of them, and a few blocks of copied files.
    """
    config = request.settings(contracts.Export)
    source = request.one("policy")
    tensors = part_tensors(source, source.part)
    if config.lora is not None and config.below is not None:
        both = Joined((config.below, part_tensors(request.one(INIT), INIT)), (config.lora, tensors))
        files, folder = lora_files(both, both.config), ""
    elif config.lora is not None:
        files, folder = lora_files(tensors, config.lora), ""
    else:
        files, folder = full_pipeline(directories.resolve_path(config.model.path), tensors), "pipeline/"
    for number, (name, chunks) in enumerate(files):
        context.progress("exporting", number, number + 1)
        context.attempt.put_stream(folder + name, chunks)
    return {}
