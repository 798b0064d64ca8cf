"""The policy of a VLM as transformers or peft loads it, with the averaged weights if there are any."""

from typing import Any

from cosmos_rl_core.vlms._export import adapter_files, model_files
from stages.artifacts.request import Request
from stages.execution.context import Context, Ranks
from stages.formats.sample_tensors import part_tensors
from stages.vlm.contracts import VlmExport
from stages.vlm.loading import check_base


def run(request: Request, context: Context[Ranks]) -> dict[str, Any]:
    """Write a whole model under ``model/``, or an adapter under ``adapter/``. Tensors are streamed one at a time."""
    config, source = request.settings(VlmExport), request.one("policy")
    check_base(config.vlm)
    tensors = part_tensors(source, source.part)
    if config.lora is None:
        folder, files = "model", model_files(config.vlm.path, tensors)
    else:
        folder, files = "adapter", adapter_files(tensors, config.lora)
    for number, (name, chunks) in enumerate(files):
        context.progress("exporting", number, number + 1)
        context.attempt.put_stream(f"{folder}/{name}", chunks)
    return {}
