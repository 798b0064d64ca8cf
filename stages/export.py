"""The policy as users load it: diffusers' own layout, from the average if there is one."""

from pathlib import Path
from typing import Any

from cosmos_rl_core import pipelines
from cosmos_rl_core.export import full_pipeline, lora_files
from stages import contracts
from stages.contracts import Request
from stages.policy import read_part
from stages.runner import Context


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``lora/model.safetensors`` and ``lora/adapter_config.json``, or a whole pipeline under ``pipeline/``."""
    config = request.config
    assert isinstance(config, contracts.Export)
    source = request.one("policy")
    tensors = read_part(source, source.part)
    if config.lora is not None:
        for name, data in lora_files(tensors, config.lora).items():
            context.attempt.put(name, data)
        return {}
    for name, data in full_pipeline(pipelines.resolve_path(config.model.path), tensors):
        context.attempt.put(f"pipeline/{name}", data.read_bytes() if isinstance(data, Path) else data)
    return {}
