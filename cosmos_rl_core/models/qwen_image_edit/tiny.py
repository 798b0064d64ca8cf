"""A tiny pipeline of the model plugin qwen_image_edit."""

import json
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPlusPipeline,
    QwenImageTransformer2DModel,
)
from transformers import AddedToken, Qwen2Tokenizer, Qwen2VLImageProcessorPil

from cosmos_rl_core.tiny.texts import qwen

PICTURE_PIXELS = 16 * 28 * 28
"""Largest number of pixels of a picture that the text encoder reads: 16 tokens."""


def save(folder: Path, seed: int = 0, *, zero_cond_t: bool = False) -> Path:
    """Write a QwenImageEditPlusPipeline: latents of 4 channels, 16 pixels wide.

    A picture of the pipeline's own size, 1024 x 1024 pixels, therefore has 1024 tokens. The processor is written
    without its part for videos, which needs torchvision.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _pipeline(zero_cond_t)
        pipeline.save_pretrained(folder)
    pipeline.tokenizer.save_pretrained(folder / "processor")
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=PICTURE_PIXELS).save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _pipeline(zero_cond_t: bool) -> QwenImageEditPlusPipeline:
    text_encoder, tokenizer = qwen()
    pipeline = QwenImageEditPlusPipeline(
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
            zero_cond_t=zero_cond_t,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=2,
            z_dim=4,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True, False],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.5, 0.7, 2.0, 1.0],
        ),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=None,  # pyright: ignore[reportArgumentType]
    )
    _shorten(tokenizer, pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx)
    text_encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    return pipeline


def _shorten(tokenizer: Qwen2Tokenizer, template: str, num_tokens: int) -> None:
    """Add a token of many letters, so that the template's words before a prompt have ``num_tokens`` tokens.

    The pipeline leaves out so many tokens at the beginning.
    """
    before = template.split("{}", maxsplit=1)[0]
    words = before.split("\n")[1]
    surplus = len(tokenizer(before)["input_ids"]) - num_tokens
    tokenizer.add_tokens([AddedToken(words[: surplus + 1], normalized=False)])
    assert len(tokenizer(before)["input_ids"]) == num_tokens
