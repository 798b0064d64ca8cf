"""Shapes of the weights of Qwen2.5-VL and Qwen3-VL, from ``config.json`` alone, by the names of transformers 5.23."""

from collections.abc import Mapping
from typing import Any

from cosmos_rl_core.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]
TEXT, VISION, LAYERS = "model.language_model", "model.visual", "layers"
TABLES = (f"{TEXT}.embed_tokens.weight", f"{VISION}.pos_embed.weight")
"""Weights that are looked up, not multiplied."""
BLOCK = rf"{VISION}\.blocks\.\d+\.|{TEXT}\.{LAYERS}\.\d+\."
"""Regular expression of the beginning of the names of a repeated block's weights."""
OUTPUT = "lm_head.weight"
"""Weight of the output layer. A model that ties it to the first table has no such weight."""


def qwen25(config: Config) -> Shapes:
    """Return the shapes of the weights of a Qwen2.5-VL. Raises :class:`ConfigError` for a missing number."""
    vision = _Numbers(config["vision_config"], "vision_config", {"patch_size": 14})
    width, inner, out = (vision[name] for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    shapes = _patches(vision)
    for number in range(vision["depth"]):
        block = f"{VISION}.blocks.{number}"
        shapes |= {f"{block}.norm{side}.weight": (width,) for side in (1, 2)}
        shapes |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        shapes |= _linear(f"{block}.mlp.gate_proj", inner, width) | _linear(f"{block}.mlp.up_proj", inner, width)
        shapes |= _linear(f"{block}.mlp.down_proj", width, inner)
    merged, merger = width * vision["spatial_merge_size"] ** 2, f"{VISION}.merger"
    shapes |= {f"{merger}.ln_q.weight": (width,)}
    shapes |= _linear(f"{merger}.mlp.0", merged, merged) | _linear(f"{merger}.mlp.2", out, merged)
    # Files of earlier versions of transformers have no table of their own for the language model.
    text = _Numbers(config.get("text_config", config), "text_config", {})
    return shapes | _language(config, text, text["hidden_size"] // text["num_attention_heads"], biased=True)


def qwen3(config: Config) -> Shapes:
    """Return the shapes of the weights of a Qwen3-VL. Raises :class:`ConfigError` for a missing number."""
    vision = _Numbers(config["vision_config"], "vision_config", {"patch_size": 16})
    width, inner, out = (vision[name] for name in ("hidden_size", "intermediate_size", "out_hidden_size"))
    shapes = _patches(vision)
    shapes |= {f"{VISION}.patch_embed.proj.bias": (width,)}
    shapes |= {f"{VISION}.pos_embed.weight": (vision["num_position_embeddings"], width)}
    for number in range(vision["depth"]):
        block = f"{VISION}.blocks.{number}"
        shapes |= _norm(f"{block}.norm1", width) | _norm(f"{block}.norm2", width)
        shapes |= _linear(f"{block}.attn.qkv", 3 * width, width) | _linear(f"{block}.attn.proj", width, width)
        shapes |= _linear(f"{block}.mlp.linear_fc1", inner, width) | _linear(f"{block}.mlp.linear_fc2", width, inner)
    merged = width * vision["spatial_merge_size"] ** 2
    deep = range(len(config["vision_config"].get("deepstack_visual_indexes", (8, 16, 24))))
    mergers = {f"{VISION}.merger": width} | {f"{VISION}.deepstack_merger_list.{number}": merged for number in deep}
    for merger, normed in mergers.items():
        shapes |= _norm(f"{merger}.norm", normed)
        shapes |= _linear(f"{merger}.linear_fc1", merged, merged) | _linear(f"{merger}.linear_fc2", out, merged)
    text = _Numbers(config["text_config"], "text_config", {"head_dim": 128})
    return shapes | _language(config, text, text["head_dim"], biased=False)


class _Numbers:
    """The whole numbers in a table of ``config.json``, with the defaults of transformers."""

    def __init__(self, table: Config, name: str, defaults: Mapping[str, int]) -> None:
        self._table, self._name = table, name
        shared = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": table.get("in_chans", 3)}
        self._defaults = shared | dict(defaults)

    def __getitem__(self, name: str) -> int:
        found = self._table.get(name, self._defaults.get(name))
        if not isinstance(found, int) or isinstance(found, bool):
            raise ConfigError(f"config.json: {name} of {self._name} is {found!r}, expected a whole number")
        return found


def _patches(vision: _Numbers) -> Shapes:
    side, length, channels = (vision[name] for name in ("patch_size", "temporal_patch_size", "in_channels"))
    return {f"{VISION}.patch_embed.proj.weight": (vision["hidden_size"], channels, length, side, side)}


def _language(config: Config, text: _Numbers, head: int, *, biased: bool) -> Shapes:
    """Return the shapes of the language model. If ``biased``, queries, keys and values have biases, else norms.

    ``head`` is the width of an attention head.
    """
    width, inner, vocabulary = (text[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    shapes: Shapes = {f"{TEXT}.embed_tokens.weight": (vocabulary, width), f"{TEXT}.norm.weight": (width,)}
    for number in range(text["num_hidden_layers"]):
        layer = f"{TEXT}.{LAYERS}.{number}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes |= _linear(f"{layer}.self_attn.{name}_proj", rows, width, bias=biased)
        if not biased:
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
        shapes |= _linear(f"{layer}.self_attn.o_proj", width, queries, bias=False)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes |= _linear(f"{layer}.mlp.down_proj", width, inner, bias=False)
        shapes |= {f"{layer}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return shapes if config.get("tie_word_embeddings", False) else shapes | {OUTPUT: (vocabulary, width)}


def _linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}
