"""A tiny pipeline of the model plugin cosmos_predict2_5."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    Cosmos2_5_PredictBasePipeline,
    CosmosTransformer3DModel,
    UniPCMultistepScheduler,
)

from cosmos_rl_core.tiny.autoencoders import wan_vae
from cosmos_rl_core.tiny.texts import (
    qwen,
)


def save(folder: Path, seed: int = 0, *, latent_channels: int = 4, **transformer: Any) -> Path:
    """Write a Cosmos2_5_PredictBasePipeline: 8 x 8 x 4 compression, a projection of the text.

    Its index names no safety checker. Real pipelines have 16 ``latent_channels``. ``transformer`` are further settings
    of the transformer, such as ``concat_padding_mask``: real ones set it, and it needs torchvision to run.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        _pipeline(latent_channels, transformer).save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    del index["safety_checker"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


class LetsPass:
    """Safety checker that refuses nothing: the stock pipeline can be neither made nor called without one."""

    def to(self, *_: Any) -> None:
        """Do nothing: there are no weights."""

    def check_text_safety(self, _: str) -> bool:
        """Return True: every prompt passes."""
        return True


def _pipeline(latent_channels: int, transformer: dict[str, Any]) -> Cosmos2_5_PredictBasePipeline:
    text_encoder, tokenizer = qwen()
    sizes: dict[str, Any] = {"num_attention_heads": 2, "concat_padding_mask": False} | transformer
    return Cosmos2_5_PredictBasePipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer,  # pyright: ignore[reportArgumentType]
        transformer=CosmosTransformer3DModel(
            in_channels=latent_channels + 1,
            out_channels=latent_channels,
            attention_head_dim=16,
            num_layers=2,
            text_embed_dim=16,
            adaln_lora_dim=8,
            max_size=(8, 8, 8),
            rope_scale=(1.0, 3.0, 3.0),
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=2 * 16,
            encoder_hidden_states_channels=16,
            **sizes,
        ),
        vae=wan_vae(latent_channels),
        scheduler=UniPCMultistepScheduler(
            use_karras_sigmas=True,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
            sigma_max=200.0,  # pyright: ignore[reportArgumentType]
            sigma_min=0.01,  # pyright: ignore[reportArgumentType]
        ),
        safety_checker=LetsPass(),  # pyright: ignore[reportArgumentType]
    )
