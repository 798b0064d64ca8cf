"""The kinds of training that files of cosmos-rl's first schema ask for, and the check whether this project has them."""

from pathlib import Path

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rows import Upstream
from cosmos_rl_core.vlms._base import serving

POLICY, MODEL = "train.train_policy", "policy.model_name_or_path"
VLMS = ("cosmos-reason", "qwen2.5-vl", "qwen2_5_vl", "qwen3-vl", "qwen3_vl")
"""Parts of the names of vision-language models, in lower case."""
_HERE = (
    "Trained here are diffusion models (policy.is_diffusers = true) and, by supervised fine-tuning, vision-language "
    'models: train.train_policy.type = "sft" with [custom.dataset], as in Cosmos-Reason2\'s examples, or with a model '
    "of Qwen2.5-VL or Qwen3-VL. Use cosmos-rl for others"
)


def is_supervised(upstream: Upstream) -> bool:
    """Return whether a file asks for supervised fine-tuning.

    Without ``type`` it does unless it has a setting of training with rewards, as in cosmos-rl.
    """
    kind = upstream[f"{POLICY}.type"]
    if kind is not None:
        return kind == "sft"
    hints = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
    return not any(upstream.says(f"{POLICY}.{hint}") for hint in hints)


def is_diffusion(upstream: Upstream) -> bool:
    """Return whether cosmos-rl reads the file as a file for a diffusion model."""
    return upstream.says("policy.is_diffusers") and upstream["policy.is_diffusers"] is not False


def is_vlm(upstream: Upstream) -> bool:
    """Return whether a file asks for supervised fine-tuning of a vision-language model."""
    others = is_diffusion(upstream) or upstream.says("vla") or upstream["distillation.enable"] is True
    if others or upstream.says("policy.diffusers") or not is_supervised(upstream):
        return False
    return has_chats(upstream) or _names_vlm(upstream)


def has_chats(upstream: Upstream) -> bool:
    """Return whether a file has the dataset of one of the scripts of Cosmos-Reason2's examples."""
    return any(upstream.says(f"custom.dataset.{key}") for key in ("annotation_path", "path"))


def require_trained_here(upstream: Upstream) -> None:
    """Raise :class:`ConfigError` that names the file's kind of training if this project does not have it."""
    if is_diffusion(upstream) or is_vlm(upstream):
        return
    found = f"cosmos-rl reads this file as one of {_kind(upstream)}, because policy.is_diffusers is not true"
    if upstream.says("policy.diffusers"):
        raise ConfigError(f"{found}. For a diffusers pipeline set policy.is_diffusers = true; else use cosmos-rl")
    raise ConfigError(f"{found}. {_HERE}")


def _kind(upstream: Upstream) -> str:
    """Return a text that names the kind of training and the model of a file."""
    model = upstream[MODEL] or "unnamed"
    if upstream.says("vla"):
        return f"a vision-language-action model ({model})"
    # The file does not say what kind of model any other one is.
    trained = f"a vision-language model ({model})" if _names_vlm(upstream) else f"another model ({model})"
    if upstream["distillation.enable"] is True:
        return f"distillation of {trained}"
    if is_supervised(upstream):
        return f"supervised fine-tuning of {trained}"
    return f"reinforcement learning ({upstream[f'{POLICY}.type'] or 'grpo'}) of {trained}"


def _names_vlm(upstream: Upstream) -> bool:
    """Return whether a VLM plugin serves the model, judged by its folder if it has one, else by its name."""
    model = str(upstream[MODEL] or "")
    if not Path(model).is_dir():
        return any(part in model.lower() for part in VLMS)
    try:
        serving(model)
    except ConfigError:
        return False
    return True
