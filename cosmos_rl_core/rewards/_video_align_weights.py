"""Conversion of the published files of VideoReward to a folder of safetensors."""

import ast
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken
from torch import Tensor

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers import pickled_tensors
from cosmos_rl_core.rewards._video_align import NORMALISATION, PROMPT, TOKENS

ARCHITECTURE = "Qwen2VLRewardModelBT"
CONSTANT = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
"""Name, in ``prompt_template.py``, of the text that the model was trained with."""
_PEFT = "base_model.model."
_SETTINGS = ("preprocessor_config.json", "chat_template.json", "chat_template.jinja", "generation_config.json")


def convert(source: Path, target: Path) -> None:
    """Write the folder; see :func:`cosmos_rl_core.rewards.video_align.prepare`."""
    settings = _json(source / "model_config.json")
    base = source / "base"
    config = _json(base / "config.json")
    weights = merged(pickled_tensors.read(_checkpoint(source), "model.pth of VideoReward"), _lora(settings))
    prompt, normalisation = _prompt(source / "prompt_template.py"), _normalisation(settings)
    target.mkdir(parents=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base, local_files_only=True)
    # Not special to the tokenizer: the text around prompts has them on purpose.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOKENS.values()])
    tokenizer.save_pretrained(target)
    for name in _SETTINGS:
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)
    weights["rm_head.weight"] = _head(weights["rm_head.weight"])
    rows = weights["model.language_model.embed_tokens.weight"].shape[0]
    (target / "config.json").write_text(json.dumps(_resized(config, rows)), encoding="utf-8")
    (target / PROMPT).write_text(prompt, encoding="utf-8")
    (target / NORMALISATION).write_text(json.dumps(normalisation), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / "model.safetensors")


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
            raise ConfigError(f"{name} has no weight {weight}, or no lora_B beside it; fetch the checkpoint again")
        whole = found[weight].float() + scale * (up.float() @ down.float())
        found[weight] = whole.to(found[weight].dtype)
    # What PEFT trained as a whole lies twice: as it was, and as it is now.
    kept = {name: tensor for name, tensor in found.items() if ".original_module." not in name}
    renamed = {_name(name.replace(".modules_to_save.default.", ".")): tensor for name, tensor in kept.items()}
    return {name: tensor for name, tensor in renamed.items() if not name.startswith("lm_head.")}


def _name(name: str) -> str:
    """Return a weight's name in transformers 5, which has the towers in ``model``."""
    if name.startswith("visual."):
        return f"model.{name}"
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def _head(published: Tensor) -> Tensor:
    """Return the head with a row for each token. The published one has a single row, which scores at all of them."""
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


def _prompt(path: Path) -> str:
    """Return the constant of a Python file, which is parsed and not run."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing; copy it from the repository KwaiVGI/VideoAlign")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == CONSTANT:
            return str(ast.literal_eval(node.value))
    raise ConfigError(f"{path} has no constant {CONSTANT}")


def _resized(config: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return the base's settings for a model with so many embeddings."""
    nested = config.get("text_config")
    sizes = {"text_config": {**nested, "vocab_size": rows}} if isinstance(nested, dict) else {"vocab_size": rows}
    return {**config, **sizes, "architectures": [ARCHITECTURE], "tie_word_embeddings": False}


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} is missing; fetch it")
    return json.loads(path.read_text(encoding="utf-8"))
