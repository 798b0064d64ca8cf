"""ImageReward's model in the classes of transformers: BLIP's picture and text encoders, and a perceptron."""

from typing import Any, Literal

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers.models.blip.modeling_blip import BlipPreTrainedModel, BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from cosmos_rl_core.parallel import devices
from cosmos_rl_core.parallel.kept import frozen

MAX_TOKENS = 35
WIDTHS = (1024, 128, 64, 16)


class Perceptron(nn.Module):
    """Linear layers without activations. The missing layer numbers were dropouts, which do nothing here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        a, b, c, d = WIDTHS
        layers = {0: (width, a), 2: (a, b), 4: (b, c), 6: (c, d), 7: (d, 1)}
        self.layers = nn.ModuleDict({str(i): nn.Linear(*sizes) for i, sizes in layers.items()})

    def forward(self, features: Tensor) -> Tensor:
        """Return a number for each row of features: ``[n, width]`` to ``[n]``."""
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
    """The network with its tokenizer and image processor, frozen, in eval mode."""

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
    network: Any = frozen(Network, model, where, devices.current(), dtype=getattr(torch, dtype))
    return ImageReward(network, transformers.BertTokenizer.from_pretrained(tokenizer, local_files_only=True))
