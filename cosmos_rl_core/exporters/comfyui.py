"""LoRA files as ComfyUI reads them: names of tensors, and the strength of every module. Imports no torch.

ComfyUI multiplies ``B A`` by ``alpha / rank``, where ``alpha`` is a tensor next to both; without it, silently by 1.
It leaves out tensors whose names it does not know, with a line in its log. So here every module has its ``alpha``, and
a module that ComfyUI has no name for is refused.
Source: ``comfy/weight_adapter/lora.py`` of ComfyUI.
"""

import io
import struct
from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines.comfyui import PREFIX, Name
from cosmos_rl_core.storage.tensor_headers import NUM_BYTES, header_bytes, read_header
from cosmos_rl_core.weights import lora

_SHOWN = 5


def lora_file(data: bytes, settings: Mapping[str, Any], named: Name) -> bytes:
    """Return the LoRA file of an export with the names and alphas of ComfyUI; tensors keep their bytes.

    ``data`` has the format safetensors; ``settings`` is the content of its ``adapter_config.json``. Raises
    :class:`ConfigError` that names the modules whose adapters ComfyUI does not read.
    """
    config = LoraConfig(
        r=settings["r"],
        lora_alpha=settings["lora_alpha"],
        use_rslora=settings.get("use_rslora", False),
        r_pattern=settings.get("rank_pattern", {}),
        alpha_pattern=settings.get("alpha_pattern", {}),
    )
    entries = read_header(io.BytesIO(data))
    names = {module: named(module) for module, _ in map(_split, (entry.name for entry in entries))}
    if unread := [module for module, name in names.items() if name is None]:
        more = f" and {len(unread) - _SHOWN} more" if len(unread) > _SHOWN else ""
        raise ConfigError(
            f"ComfyUI reads no adapter of {', '.join(unread[:_SHOWN])}{more}; train a LoRA of attention and "
            "feed-forward modules (policy.lora.target_modules), or export for diffusers"
        )
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for entry in entries:
        module, rest = _split(entry.name)
        tensors[f"{names[module]}{rest}"] = entry.dtype, entry.shape, data[entry.start : entry.end]
    for module, name in names.items():
        alpha = lora.scale(config, module) * lora.rank(config, module)
        tensors[f"{name}.alpha"] = "F32", (), struct.pack("<f", alpha)
    order = sorted(tensors, key=lambda name: (_PLACE[tensors[name][0]], name))
    header = header_bytes(((name, *tensors[name][:2]) for name in order), {"format": "pt"})
    return b"".join([header, *(tensors[name][2] for name in order)])


_PLACE = {word: place for place, word in enumerate(NUM_BYTES)}
"""Order of the types in a file of the safetensors library."""


def _split(name: str) -> tuple[str, str]:
    """Return the module of a tensor, and the rest of its name, such as ``.lora_A.weight``."""
    module, part, rest = name.removeprefix(PREFIX).rpartition(".lora_")
    return module, f"{part}{rest}"
