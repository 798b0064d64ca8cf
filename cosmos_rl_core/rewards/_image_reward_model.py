"""ImageReward's model in the classes of transformers: BLIP's picture and text encoders, and a perceptron."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers.models.blip.modeling_blip import BlipPreTrainedModel, BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.parallel import devices
from cosmos_rl_core.pipelines.modules import align, read_module

MAX_TOKENS = 35
WIDTHS = (1024, 128, 64, 16)
VISION_HEADS, TEXT_HEADS = 16, 12
"""Attention heads of both encoders; no shape of a tensor tells them."""
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
_SHAPES = ("patch_embedding.weight", "position_embedding")
_UNUSED = re.compile(r"blip\.(vision_proj|text_proj)\..*|blip\.text_encoder\.embeddings\.position_ids")
"""Heads of BLIP's training, and numbers of places that are no weights."""


class Perceptron(nn.Module):
    """Linear layers without activations; the numbers between are dropouts, which do nothing here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        a, b, c, d = WIDTHS
        layers = {0: (width, a), 2: (a, b), 4: (b, c), 6: (c, d), 7: (d, 1)}
        self.layers = nn.ModuleDict({str(i): nn.Linear(*sizes) for i, sizes in layers.items()})

    def forward(self, features: Tensor) -> Tensor:
        """Return the answers ``[n]`` to features ``[n, width]``."""
        for layer in self.layers.values():
            features = layer(features)
        return features[:, 0]


class Network(BlipPreTrainedModel):
    """BLIP, whose text encoder looks at the picture, and the perceptron on its first token."""

    def __init__(self, config: transformers.BlipConfig) -> None:
        super().__init__(config)
        settings: Any = config
        self.vision_model = BlipVisionModel(settings.vision_config)
        self.text_encoder = BlipTextModel(settings.text_config, add_pooling_layer=False)
        self.mlp = Perceptron(settings.text_config.hidden_size)
        self.post_init()

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the answers ``[n]`` to pictures and the tokens of their prompts."""
        seen = self.vision_model(pixel_values=pixel_values).last_hidden_state
        text = self.text_encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=seen.device),
        )
        return self.mlp(text.last_hidden_state[:, 0])


class ImageReward:
    """The network with its inputs, frozen, in eval mode."""

    def __init__(self, network: Any, tokenizer: Any) -> None:
        self.network, self._tokenizer = network, tokenizer
        side = network.config.vision_config.image_size
        square = {"height": side, "width": side}
        # Sides, resampling, mean and deviation are CLIP's.
        self._processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square)

    @torch.no_grad()
    def answers(self, frames: list[np.ndarray], prompts: list[str]) -> list[float]:
        """Return the perceptron's answers to uint8 frames ``[height, width, 3]`` and their prompts."""
        device, dtype = self.network.device, self.network.dtype
        pixels: Any = self._processor(images=[Image.fromarray(f) for f in frames], return_tensors="pt")["pixel_values"]
        settings = {"padding": "max_length", "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
        tokens = self._tokenizer(prompts, **settings)
        given = tokens["input_ids"].to(device), tokens["attention_mask"].to(device)
        return self.network(pixels.to(device, dtype), *given).double().tolist()


def load(model: str, tokenizer: str, dtype: Literal["float32", "bfloat16"]) -> ImageReward:
    """Return the model in a folder. Raises :class:`ArtifactError` if weights are missing."""
    where = f"the files of ImageReward in {model!r}"
    network: Any = read_module(Network, model, where, dtype=getattr(torch, dtype))
    device = devices.current()
    align(network.requires_grad_(False).eval().to(device))
    return ImageReward(network, transformers.BertTokenizer.from_pretrained(tokenizer, local_files_only=True))


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return published tensors by their names here. Raises :class:`ConfigError` for an unknown name."""
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
            raise ConfigError(f"unknown tensor {name!r}; expected those of ImageReward.pt")
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
        raise ConfigError(f"unknown tensor 'blip.visual_encoder.{name}'; expected those of ImageReward.pt")
    return f"encoder.layers.{block[1]}.{_BLOCK[block[2]]}.{kind}"


def config_of(tensors: Mapping[str, Tensor]) -> transformers.BlipConfig:
    """Return the settings of a network with these tensors, by their names here."""

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
        # That of the original, not of transformers' BLIP.
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

    ``where`` names the file in errors. Raises :class:`ConfigError` if the tensors are not those of ImageReward.
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
