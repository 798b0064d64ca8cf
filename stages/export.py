"""The policy in diffusers' own layout, from the average if there is one."""

from typing import Any

from cosmos_rl_core.pipelines import directories
from cosmos_rl_core.weights.export import full_pipeline, lora_files
from stages import contracts
from stages.artifacts.request import Request
from stages.context import Context
from stages.formats.sample_tensors import part_tensors


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``lora/model.safetensors`` and ``lora/adapter_config.json``, or a whole pipeline under ``pipeline/``.

    Tensors are streamed one at a time: memory holds a few times the largest of them, and a few blocks of copied files.
    """
    config = request.settings(contracts.Export)
    source = request.one("policy")
    tensors = part_tensors(source, source.part)
    if config.lora is not None:
        files, folder = lora_files(tensors, config.lora), ""
    else:
        files, folder = full_pipeline(directories.resolve_path(config.model.path), tensors), "pipeline/"
    for number, (name, chunks) in enumerate(files):
        context.progress("exporting", number, number + 1)
        context.attempt.put_stream(folder + name, chunks)
    return {}
