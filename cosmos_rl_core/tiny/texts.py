"""Text encoders of toy size with random weights, and tokenizers made by hand."""

import string
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Tokenizer,
)

LETTERS = string.ascii_lowercase + string.digits + ".,"


def clip() -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(clip_config())


def clip_config() -> CLIPTextConfig:
    vocabulary = clip_vocabulary()
    return CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )


def clip_vocabulary() -> dict[str, int]:
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(tokens)}


def clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=clip_vocabulary(), merges=[], model_max_length=77)


def t5_sizes() -> dict[str, Any]:
    return {
        "vocab_size": len(LETTERS) + 4, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
        "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    }  # fmt: skip


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "\N{LOWER ONE EIGHTH BLOCK}", *LETTERS]
    return T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0)


def gemma() -> Gemma2Model:
    return Gemma2Model(
        Gemma2Config(
            vocab_size=len(gemma_vocabulary()),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
        )
    )


def gemma_vocabulary() -> dict[str, int]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\N{LOWER ONE EIGHTH BLOCK}", *LETTERS]
    return {token: i for i, token in enumerate(tokens)}


def gemma_tokenizer() -> GemmaTokenizer:
    return GemmaTokenizer(vocab=gemma_vocabulary(), merges=[], add_bos_token=True)


def qwen() -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"]
    tokens = [*sorted(ByteLevel.alphabet()), *special]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                **sizes,
                "vocab_size": len(tokens),
                "num_hidden_layers": 2,
                "num_key_value_heads": 1,
                "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 10000.0},
                "bos_token_id": vocabulary["<|endoftext|>"],
                "eos_token_id": vocabulary["<|im_end|>"],
            },
            vision_config={**sizes, "depth": 1, "num_heads": 2, "out_hidden_size": 16},
            image_token_id=vocabulary["<|image_pad|>"],
            video_token_id=vocabulary["<|video_pad|>"],
            vision_start_token_id=vocabulary["<|vision_start|>"],
            vision_end_token_id=vocabulary["<|endoftext|>"],
        )
    )
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    return encoder, tokenizer


QWEN3_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]


def qwen3_vocabulary() -> dict[str, int]:
    return {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), *QWEN3_SPECIAL])}


def qwen3_config(num_hidden_layers: int, initializer_range: float = 0.02) -> Qwen3Config:
    vocabulary = qwen3_vocabulary()
    return Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_hidden_layers,
        initializer_range=initializer_range,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        bos_token_id=vocabulary["<|endoftext|>"],
        eos_token_id=vocabulary["<|im_end|>"],
    )


def qwen3_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer of bytes, with Qwen3's words around a message: without thinking, an empty thought."""
    tokenizer = Qwen2Tokenizer(vocab=qwen3_vocabulary(), merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN3_SPECIAL[1:]})
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    return tokenizer
