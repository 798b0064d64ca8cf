"""A Stable Diffusion 3 pipeline of 2.3 million weights for images of 32 x 64 pixels.

Every part has the stock class, so that code for the real model works on this one. The text encoders are random and
frozen; the autoencoder and the transformer are trained.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from cosmos_rl_core import seeds

LATENT_CHANNELS = 4
JOINT_WIDTH = 128
CLIP_WIDTH = 64
PRINTABLE = [chr(code) for code in range(33, 127)]
PROMPT_WORDS = ("a", "sign", "that", "says")
"""Words of one token each, so that a prompt of ``rendered_text`` fits in :data:`MAX_TOKENS`."""
MAX_TOKENS = 12


def build_sd3(seed: int) -> StableDiffusion3Pipeline:
    """Return the whole pipeline with random weights, float32 on the CPU, from ``seed`` alone.

    Generate with ``height=32, width=64, guidance_scale=1.0, max_sequence_length=12``: with the stock length of 256
    every prompt would be padded with noise from the random T5.
    """
    tokenizers = [clip_tokenizer(), clip_tokenizer()]
    encoders = [clip_text_encoder(tokenizers[i], seed, "clip", i) for i in range(2)]
    tokenizer_3 = t5_tokenizer()
    return StableDiffusion3Pipeline(
        transformer=build_transformer(seed),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=build_vae(seed),
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=_t5_encoder(len(tokenizer_3), seed),
        tokenizer_3=tokenizer_3,
    )


def build_transformer(seed: int) -> SD3Transformer2DModel:
    """Return the transformer: 4 joint blocks of width 128 over 32 image tokens and 24 text tokens."""
    with seeded(seed, "transformer"):
        return SD3Transformer2DModel(
            sample_size=32,
            patch_size=4,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=JOINT_WIDTH,
            caption_projection_dim=128,
            pooled_projection_dim=2 * CLIP_WIDTH,
            pos_embed_max_size=8,
            qk_norm="rms_norm",
        )


def build_vae(seed: int) -> AutoencoderKL:
    """Return the autoencoder: pixels ``[B, 3, H, W]`` in [-1, 1] to latents ``[B, 4, H/2, W/2]``."""
    with seeded(seed, "vae"):
        return AutoencoderKL(
            block_out_channels=(16, 32),  # pyright: ignore[reportArgumentType]
            down_block_types=("DownEncoderBlock2D",) * 2,  # pyright: ignore[reportArgumentType]
            up_block_types=("UpDecoderBlock2D",) * 2,  # pyright: ignore[reportArgumentType]
            layers_per_block=1,
            norm_num_groups=8,
            latent_channels=LATENT_CHANNELS,
            sample_size=64,
            mid_block_add_attention=False,
            use_quant_conv=False,
            use_post_quant_conv=False,
            scaling_factor=1.0,
            shift_factor=0.0,
        )


def _t5_encoder(vocab_size: int, seed: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocab_size,
        d_model=JOINT_WIDTH,
        d_kv=32,
        d_ff=128,
        num_layers=1,
        num_heads=4,
        n_positions=MAX_TOKENS,  # pyright: ignore[reportCallIssue]
    )
    with seeded(seed, "t5"):
        encoder = T5EncoderModel(config)
    return encoder.eval().requires_grad_(False)


@contextmanager
def seeded(*key: seeds.Key) -> Iterator[None]:
    """Draw weights of modules that are built in the block on the CPU, from the key alone. Restores the random state."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.random.default_generator.manual_seed(seeds.derive("tiny", *key))
        yield


def clip_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer of lower-case characters and the words of the prompt template, equal on every machine."""
    letters = [char for char in PRINTABLE if char == char.lower()]
    tokens = letters + [f"{char}</w>" for char in letters]
    merges = [merge for word in PROMPT_WORDS for merge in _merges(word)]
    tokens += dict.fromkeys("".join(merge) for merge in merges)
    vocab = {token: index for index, token in enumerate([*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TOKENS)  # pyright: ignore[reportArgumentType]


def t5_tokenizer() -> T5Tokenizer:
    """Return a tokenizer of characters and the words of the prompt template."""
    words = [f"▁{word}" for word in PROMPT_WORDS]
    pieces = ["<pad>", "</s>", "<unk>", "▁", *words, *PRINTABLE]
    scores = {"▁": -2.0} | dict.fromkeys(words, -1.0)
    vocab = [(piece, 0.0 if index < 3 else scores.get(piece, -3.0)) for index, piece in enumerate(pieces)]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=MAX_TOKENS)


def clip_text_encoder(tokenizer: CLIPTokenizer, *key: seeds.Key) -> CLIPTextModelWithProjection:
    """Return a frozen random CLIP text encoder. Wide token embeddings separate different words without training."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,  # pyright: ignore[reportArgumentType]
        eos_token_id=tokenizer.eos_token_id,  # pyright: ignore[reportArgumentType]
        pad_token_id=tokenizer.pad_token_id,  # pyright: ignore[reportArgumentType]
    )
    with seeded(*key):
        encoder = CLIPTextModelWithProjection(config)
        embeddings = encoder.text_model.embeddings
        torch.nn.init.normal_(embeddings.token_embedding.weight, std=1.0)
        torch.nn.init.normal_(embeddings.position_embedding.weight, std=0.5)
    return encoder.eval().requires_grad_(False)


def _merges(word: str) -> list[tuple[str, str]]:
    """Return the byte-pair merges that build a word from the left; its last letter has the end mark."""
    letters = [*word[:-1], f"{word[-1]}</w>"]
    return [("".join(letters[:i]), letters[i]) for i in range(1, len(letters))]
