"""Weights of ImageReward from the published file: new names of its tensors, and settings read off their shapes."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from torch import Tensor

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards._image_reward.model import Network

VISION_HEADS, TEXT_HEADS = 16, 12
"""Numbers of attention heads of both encoders, which no shape of a tensor shows."""
_PICTURE = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding",
    "norm": "post_layernorm",
}
_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_UNUSED = re.compile(r"blip\.(vision_proj|text_proj)\..*|blip\.text_encoder\.embeddings\.position_ids")
"""Tensors that are left out: heads of BLIP's training, and indices of positions, which are no weights."""


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the published tensors by their names in :class:`Network`. Raises :class:`ConfigError` for unknown ones."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if _UNUSED.fullmatch(name):
            continue
        kind, _, rest = name.removeprefix("blip.").partition(".")
        if kind == "visual_encoder":
            found[f"vision_model.{_of_picture(rest)}"] = tensor.contiguous()
        elif kind in ("text_encoder", "mlp"):
            found[f"{kind}.{rest}"] = tensor.contiguous()
        else:
            raise ConfigError(f"unknown tensor {name!r}; expected a tensor of ImageReward.pt")
    return found


def _of_picture(name: str) -> str:
    """Return the name in transformers of a tensor of the picture encoder."""
    if name in _PICTURE:
        return _PICTURE[name]
    place, _, kind = name.rpartition(".")
    if place in _PICTURE:
        return f"{_PICTURE[place]}.{kind}"
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", place)
    if block is None or block[2] not in _BLOCK:
        raise ConfigError(f"unknown tensor 'blip.visual_encoder.{name}'; expected a tensor of ImageReward.pt")
    return f"encoder.layers.{block[1]}.{_BLOCK[block[2]]}.{kind}"


def config_of(tensors: Mapping[str, Tensor]) -> transformers.BlipConfig:
    """Return the settings of a network with these tensors, which have their names in :class:`Network`."""

    def layers(start: str) -> int:
        return 1 + max(int(name.removeprefix(start).split(".")[0]) for name in tensors if name.startswith(start))

    patch, places = (
        tensors[f"vision_model.embeddings.{kind}"] for kind in ("patch_embedding.weight", "position_embedding")
    )
    words, text_places = (tensors[f"text_encoder.embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
    vision = {
        "hidden_size": patch.shape[0],
        "intermediate_size": tensors["vision_model.encoder.layers.0.mlp.fc1.weight"].shape[0],
        "num_hidden_layers": layers("vision_model.encoder.layers."),
        "num_attention_heads": VISION_HEADS,
        "patch_size": patch.shape[-1],
        "image_size": patch.shape[-1] * round((places.shape[1] - 1) ** 0.5),
        # The original has this value, transformers' BLIP another one.
        "layer_norm_eps": 1e-6,
    }
    text = {
        "vocab_size": words.shape[0],
        "hidden_size": words.shape[1],
        "intermediate_size": tensors["text_encoder.encoder.layer.0.intermediate.dense.weight"].shape[0],
        "num_hidden_layers": layers("text_encoder.encoder.layer."),
        "num_attention_heads": TEXT_HEADS,
        "max_position_embeddings": text_places.shape[0],
    }
    return transformers.BlipConfig(vision_config=vision, text_config=text)


def convert(tensors: Mapping[str, Tensor], target: Path, where: str) -> None:
    """Write ``config.json`` and ``model.safetensors`` to the new folder ``target``.

    ``where`` names the file in errors. Raises :class:`ConfigError` if the tensors do not belong to ImageReward.
    """
    try:
        found = renamed(tensors)
        with torch.device("meta"):
            network = Network(config_of(found))
        network.load_state_dict(found, assign=True)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{where}: {str(error)[:1000]}; expected ImageReward.pt") from error
    except RuntimeError as error:
        raise ConfigError(f"{where}: {str(error)[:1000]}") from error
    network.save_pretrained(target)
