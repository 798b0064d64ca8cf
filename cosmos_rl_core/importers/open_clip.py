"""CLIP models of open_clip, in the layout of transformers.

Vision transformers with open_clip's own text transformer, such as ViT-H-14. Names and shapes follow
``open_clip.model.CLIP`` and its forks. Queries, keys and values are one matrix there and three here, and the
projections are transposed.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from cosmos_rl_core.errors import ConfigError

HEADS = 16
"""Number of attention heads of ViT-H-14, for pictures and for texts, which no shape of a tensor shows."""
_WHOLE = {
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "logit_scale": "logit_scale",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    # transformers misspells this name.
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
_TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
_IN_LAYERS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)[._](weight|bias)")
_MASK = "attn_mask"
"""The causal mask, which old files hold in addition to the weights."""


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an open_clip model by their names in transformers.

    Raises :class:`ConfigError` for a name that is not one of open_clip's.
    """
    bare = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in bare.items():
        if name in _WHOLE:
            found[_WHOLE[name]] = tensor
        elif name in _TRANSPOSED:
            found[_TRANSPOSED[name]] = tensor.T
        elif (layer := _LAYER.fullmatch(name)) is not None:
            found |= _of_layer(layer, tensor)
        elif name != _MASK:
            raise ConfigError(f"unknown tensor {name!r}; expected a tensor of open_clip's CLIP")
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _of_layer(layer: re.Match[str], tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor in transformers of each part of a layer's tensor."""
    tower = "vision_model" if layer[1] else "text_model"
    place = f"{tower}.encoder.layers.{layer[2]}"
    if layer[3] == "attn.in_proj":
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{place}.self_attn.{part}_proj.{layer[4]}", rows
    elif layer[3] in _IN_LAYERS:
        yield f"{place}.{_IN_LAYERS[layer[3]]}.{layer[4]}", tensor
    else:
        raise ConfigError(f"unknown tensor {layer[0]!r}; expected a tensor of open_clip's CLIP")


def config_of(tensors: Mapping[str, Tensor]) -> CLIPConfig:
    """Return the settings of a model with these tensors, by their names in transformers."""

    def tower(name: str) -> dict[str, int | str]:
        width = tensors[f"{name}.encoder.layers.0.mlp.fc1.weight"].shape
        layers = {key.split(".")[3] for key in tensors if key.startswith(f"{name}.encoder.layers.")}
        sizes: dict[str, int | str] = {"hidden_size": width[1], "intermediate_size": width[0]}
        return sizes | {"num_hidden_layers": len(layers), "num_attention_heads": HEADS, "hidden_act": "gelu"}

    words, places = (tensors[f"text_model.embeddings.{kind}_embedding.weight"].shape for kind in ("token", "position"))
    patch = tensors["vision_model.embeddings.patch_embedding.weight"].shape[-1]
    patches = len(tensors["vision_model.embeddings.position_embedding.weight"]) - 1
    projection = len(tensors["text_projection.weight"])
    # The last two tokens of the vocabulary begin and end a text; open_clip pools at the highest token id of a text.
    marks = {"bos_token_id": words[0] - 2, "eos_token_id": words[0] - 1, "pad_token_id": words[0] - 1}
    text = {"vocab_size": words[0], "max_position_embeddings": places[0], "projection_dim": projection, **marks}
    vision = {"patch_size": patch, "image_size": patch * round(patches**0.5), "projection_dim": projection}
    return CLIPConfig(
        text_config=tower("text_model") | text,
        vision_config=tower("vision_model") | vision,
        projection_dim=projection,
    )


def convert(tensors: Mapping[str, Tensor], target: Path, where: str) -> None:
    """Write ``config.json`` and ``model.safetensors`` of an open_clip model to the new folder ``target``.

    ``where`` names the file in errors. Raises :class:`ConfigError` if the tensors do not belong to such a model.
    """
    try:
        found = renamed(tensors)
        with torch.device("meta"):
            model = CLIPModel(config_of(found))
        model.load_state_dict(found, assign=True)
    except KeyError as error:
        raise ConfigError(f"{where} has no tensor for {error} of transformers; expected open_clip's CLIP") from error
    except (ConfigError, RuntimeError) as error:
        raise ConfigError(f"{where}: {str(error)[:1000]}") from error
    model.save_pretrained(target)
