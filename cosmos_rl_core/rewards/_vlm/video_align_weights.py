"""Conversion of the published files of VideoReward to a folder of safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers import pickled_tensors
from cosmos_rl_core.rewards._vlm.rating_weights import constant, json_of, renamed, write
from cosmos_rl_core.rewards._vlm.video_align import NORMALISATION, PROMPT, TOKENS

CONSTANT = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
"""Name, in ``prompt_template.py``, of the text that the model was trained with."""
HEAD = "rm_head.weight"
_PEFT = "base_model.model."


def convert(source: Path, target: Path) -> None:
    """Write the folder; see :func:`cosmos_rl_core.rewards.video_align.prepare`."""
    settings = json_of(source / "model_config.json")
    weights = merged(pickled_tensors.read(_checkpoint(source), "model.pth of VideoReward"), _lora(settings))
    prompt = constant(source / "prompt_template.py", CONSTANT, "KwaiVGI/VideoAlign")
    weights[HEAD] = _head(weights[HEAD])
    texts = {PROMPT: prompt, NORMALISATION: json.dumps(_normalisation(settings))}
    write(target, source / "base", weights, TOKENS.values(), texts)


def merged(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return a checkpoint of PEFT as the weights of one model, by the names of transformers 5.

    ``W + scale B A`` is computed in float32. Raises :class:`ConfigError` for a factor without its weight.
    """
    plain = {name.removeprefix(_PEFT).replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    factors = {name: tensor for name, tensor in plain.items() if ".lora_" in name}
    found = {name: tensor for name, tensor in plain.items() if name not in factors}
    for name, down in factors.items():
        if ".lora_A." not in name:
            continue
        weight = f"{name.partition('.lora_A.')[0]}.weight"
        up = factors.get(name.replace(".lora_A.", ".lora_B."))
        if weight not in found or up is None:
            raise ConfigError(f"{name} has no weight {weight} or no lora_B; fetch the checkpoint again")
        whole = found[weight].float() + scale * (up.float() @ down.float())
        found[weight] = whole.to(found[weight].dtype)
    # Modules that PEFT trained as a whole are there twice: before and after training.
    kept = {name: tensor for name, tensor in found.items() if ".original_module." not in name}
    return renamed({name.replace(".modules_to_save.default.", "."): tensor for name, tensor in kept.items()})


def _head(published: Tensor) -> Tensor:
    """Return the head with a row for each token. The published head has a single row, which scores at all tokens."""
    if len(published) not in (1, len(TOKENS)):
        raise ConfigError(f"rm_head has {len(published)} rows, expected 1 or {len(TOKENS)}; fetch the checkpoint again")
    return published.expand(len(TOKENS), -1)


def _checkpoint(source: Path) -> Path:
    found = sorted(source.glob("checkpoint-*/model.pth"))
    if len(found) != 1:
        raise ConfigError(f"{len(found)} files checkpoint-*/model.pth in {source}; expected one")
    return found[0]


def _lora(settings: Mapping[str, Any]) -> float:
    lora = settings["peft_lora_config"]
    if lora.get("use_rslora"):
        raise ConfigError("use_rslora is set in model_config.json; expected plain LoRA")
    return float(lora["lora_alpha"]) / float(lora["lora_r"])


def _normalisation(settings: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    told = settings.get("inference_config") or {}
    names = {name: token.removeprefix("<|").partition("_")[0] for name, token in TOKENS.items()}
    missing = [f"{short}_{key}" for short in names.values() for key in ("mean", "std") if f"{short}_{key}" not in told]
    if missing:
        raise ConfigError(f"inference_config of model_config.json lacks {', '.join(missing)}")
    return {name: {"mean": told[f"{short}_mean"], "std": told[f"{short}_std"]} for name, short in names.items()}
