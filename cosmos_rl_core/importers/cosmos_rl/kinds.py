"""The kinds of training that cosmos-rl's files of one schema are for, and which of them are done here."""

from pathlib import Path

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.importers.cosmos_rl.rows import Upstream
from cosmos_rl_core.vlms._base import serving

POLICY, MODEL = "train.train_policy", "policy.model_name_or_path"
VLMS = ("cosmos-reason", "qwen2.5-vl", "qwen2_5_vl", "qwen3-vl", "qwen3_vl")
"""Parts of the names of vision-language models, in small letters."""
_HERE = (
    "Trained here are diffusion models (policy.is_diffusers = true) and, by supervised fine-tuning, vision-language "
    'models: train.train_policy.type = "sft" with [custom.dataset], as in Cosmos-Reason2\'s examples, or with a model '
    "of Qwen2.5-VL or Qwen3-VL. Use cosmos-rl for others"
)


def is_supervised(upstream: Upstream) -> bool:
    """Return whether a file is of supervised fine-tuning; without ``type`` cosmos-rl looks for settings of rewards."""
    kind = upstream[f"{POLICY}.type"]
    if kind is not None:
        return kind == "sft"
    hints = ("temperature", "epsilon_low", "epsilon_high", "kl_beta", "use_remote_reward")
    return not any(upstream.says(f"{POLICY}.{hint}") for hint in hints)


def is_diffusion(upstream: Upstream) -> bool:
    """Return whether cosmos-rl reads the file as one of a diffusion model."""
    return upstream.says("policy.is_diffusers") and upstream["policy.is_diffusers"] is not False


def is_vlm(upstream: Upstream) -> bool:
    """Return whether a file is of supervised fine-tuning of a vision-language model."""
    others = is_diffusion(upstream) or upstream.says("vla") or upstream["distillation.enable"] is True
    if others or upstream.says("policy.diffusers") or not is_supervised(upstream):
        return False
    return has_chats(upstream) or _names_vlm(upstream)


def has_chats(upstream: Upstream) -> bool:
    """Return whether a file has the dataset of one of the scripts of Cosmos-Reason2's examples."""
    return any(upstream.says(f"custom.dataset.{key}") for key in ("annotation_path", "path"))


def require_trained_here(upstream: Upstream) -> None:
    """Raise :class:`ConfigError`, which names the kind of training, if it is not done here."""
    if is_diffusion(upstream) or is_vlm(upstream):
        return
    found = f"cosmos-rl reads this file as one of {_kind(upstream)}, because policy.is_diffusers is not true"
    if upstream.says("policy.diffusers"):
        raise ConfigError(f"{found}. For a diffusers pipeline set policy.is_diffusers = true; else use cosmos-rl")
    raise ConfigError(f"{found}. {_HERE}")


def _kind(upstream: Upstream) -> str:
    """Return what a file trains, in words."""
    model = upstream[MODEL] or "unnamed"
    if upstream.says("vla"):
        return f"a vision-language-action model ({model})"
    # Of other models the file does not say what they are.
    trained = f"a vision-language model ({model})" if _names_vlm(upstream) else f"another model ({model})"
    if upstream["distillation.enable"] is True:
        return f"distillation of {trained}"
    if is_supervised(upstream):
        return f"supervised fine-tuning of {trained}"
    return f"reinforcement learning ({upstream[f'{POLICY}.type'] or 'grpo'}) of {trained}"


def _names_vlm(upstream: Upstream) -> bool:
    """Return whether the model is one that a plugin serves, as far as its folder or its name says."""
    model = str(upstream[MODEL] or "")
    if not Path(model).is_dir():
        return any(part in model.lower() for part in VLMS)
    try:
        serving(model)
    except ConfigError:
        return False
    return True
