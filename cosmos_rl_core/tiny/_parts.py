"""Parts of the tiny pipelines: seeded construction, and tokenizers with vocabularies written by hand."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Tokenizer

from cosmos_rl_core import seeds

PRINTABLE = [chr(code) for code in range(33, 127)]
PROMPT_WORDS = ("a", "sign", "that", "says")
"""Words of one token each, so that a prompt of ``rendered_text`` fits in :data:`MAX_TOKENS`."""
MAX_TOKENS = 12


@contextmanager
def seeded(*key: seeds.Key) -> Iterator[None]:
    """Draw the weights of modules built inside on the CPU, from the key alone; the global random state is restored."""
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


def clip_text_encoder(tokenizer: CLIPTokenizer, *key: seeds.Key, width: int = 64) -> CLIPTextModelWithProjection:
    """Return a frozen random CLIP text encoder. Wide token embeddings separate different words without training."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
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
