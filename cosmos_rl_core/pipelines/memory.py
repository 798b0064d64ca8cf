"""What one rank of a stage holds in memory, from shapes and settings alone: torch-free, so that a plan can tell.

Weights, copies, gradients and moments are counted. What a forward pass makes is estimated: by the features that go
into and come out of every matrix of the transformer's blocks, a token, and a factor that was measured.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_rl_core.parallel.parallelism import ALONE, Parallelism
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES, patch_shape

Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by name."""

HALF_BYTES = 2

SAVED, SAVED_BY_ADAPTERS, PASSING = 1.45, 0.95, 0.5
"""Numbers that a block keeps for its backward pass, to those that go into and come out of its matrices: where all
weights train, where adapters do, and how many it has at once where nothing is kept. On the tiny pipelines of all five
families, measured peaks are 0.6 to 1.7 times the estimates that come of it."""
MIXED_BYTES = 2.5
"""Bytes of such a number under autocast: products are of the half type, norms and residuals of float32."""
OUTSIDE, OUTSIDE_OF_ADAPTERS = 5, 2
"""What is kept of a token outside the blocks, to what is kept of a block that is computed again, which is its input:
where all weights train, and where adapters do."""
FLOAT32_MODULES = {"WanTransformer3DModel": ("time_embedder",)}
"""Modules whose matrices are float32 in half-precision runs too: a part of their names, by the transformer's class.
:func:`cosmos_rl_core.parallel.precision.float32_modules` reads the same from diffusers' classes."""
NOISE_LEVELS = {"CosmosTransformer3DModel": 5}
"""Besides, of transformers that are told a noise level a token."""


@dataclass(frozen=True)
class Spread:
    """How the ranks of a stage share a transformer's weights, and what they compute with."""

    parallelism: Parallelism = ALONE
    half: bool = False


@dataclass(frozen=True)
class Bytes:
    """Of one rank, the first, whose rows are never fewer than another's."""

    device: int = 0
    """On the device that computes."""
    cpu: int = 0
    """In the CPU's memory beside it."""

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.cpu + other.cpu)

    def __mul__(self, times: int) -> "Bytes":
        return Bytes(self.device * times, self.cpu * times)


@dataclass(frozen=True)
class Tokens:
    """What a transformer's blocks are given of one sample."""

    media: int
    text: int


def resting(shapes: Shapes, spread: Spread) -> Bytes:
    """One float32 copy of these tensors, as :func:`cosmos_rl_core.parallel.sharding.shard` leaves it on a rank.

    Matrices are cut by rows, and with ``fsdp_offload`` rest in the CPU's memory; everything else is whole.
    """
    whole = cut = 0
    ranks = spread.parallelism.dp_shard_size
    for name, shape in shapes.items():
        if ranks > 1 and is_matrix(name, shape):
            cut += -(-shape[0] // ranks) * math.prod(shape[1:])
        else:
            whole += math.prod(shape)
    on_cpu = cut if spread.parallelism.fsdp_offload else 0
    return Bytes(FLOAT32_BYTES * (whole + cut - on_cpu), FLOAT32_BYTES * on_cpu)


def in_half(shapes: Shapes, config: Mapping[str, Any]) -> int:
    """Bytes of these tensors where matrices, and adapters, are of a half type and everything else of float32, as
    :mod:`cosmos_rl_core.weights.half_weights` leaves them. ``config`` is the transformer's own."""
    kept = set(FLOAT32_MODULES.get(config.get("_class_name", ""), ()))

    def bytes_each(name: str, shape: tuple[int, ...]) -> int:
        cast = (is_matrix(name, shape) or ".lora_" in name) and not kept & set(name.split("."))
        return HALF_BYTES if cast else FLOAT32_BYTES

    return sum(math.prod(shape) * bytes_each(name, shape) for name, shape in shapes.items())


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear or convolution module of the base model."""
    return name.endswith(".weight") and len(shape) > 1 and ".lora_" not in name


def visiting(shapes: Shapes, spread: Spread, *, backward: bool, all_train: bool, checkpointing: bool = False) -> int:
    """Bytes of the matrices of ``shapes`` in the form that they are computed with, where that is not how they rest.

    Shared ones: the root and, since the next block is fetched while one is at work, two of the largest; on the way
    ``backward`` also the float32 gradients of one, and of the root, where ``all_train``. On a rank with all weights:
    what autocast casts them to. It keeps every cast of a weight that trains, and a way backward without
    ``checkpointing`` those of all blocks; else there is a block's at a time.
    """
    blocks = {block: sum(map(math.prod, matrices.values())) for block, matrices in _blocks(shapes).items()}
    largest, every = max(blocks.values(), default=0), sum(blocks.values())
    root = sum(math.prod(shape) for name, shape in shapes.items() if is_matrix(name, shape)) - every
    bytes_each = HALF_BYTES if spread.half else FLOAT32_BYTES
    if spread.parallelism.dp_shard_size > 1:
        gradients = FLOAT32_BYTES * (root + largest) if backward and all_train else 0
        return bytes_each * (root + min(2 * largest, every)) + gradients
    if not spread.half:
        return 0
    return bytes_each * (root + every if all_train else every if backward and not checkpointing else largest)


def activations(
    shapes: Shapes, config: Mapping[str, Any], tokens: Tokens, *, lora: bool, half: bool, checkpointing: bool
) -> int:
    """Bytes that the backward pass of one sample needs: an estimate.

    ``config`` is the transformer's own. With ``checkpointing`` they are the inputs of the blocks, and what one block
    keeps as it is computed again.
    """
    each = _held_by_block(shapes, config, tokens, SAVED_BY_ADAPTERS if lora else SAVED)
    if not checkpointing:
        return round(sum(each) * _bytes_each(half))
    kind = config.get("_class_name", "")
    outside = (OUTSIDE_OF_ADAPTERS if lora else OUTSIDE) + NOISE_LEVELS.get(kind, 0)
    streams = tokens.media + (tokens.text if kind in _TWO_STREAMS else 0)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    return round(((len(each) + outside) * streams * width + max(each, default=0)) * _bytes_each(half))


def passing(shapes: Shapes, config: Mapping[str, Any], tokens: Tokens, *, half: bool) -> int:
    """Bytes that a forward pass of one sample without gradients needs: an estimate."""
    return round(max(_held_by_block(shapes, config, tokens, PASSING), default=0) * _bytes_each(half))


def num_tokens(latent_shape: tuple[int, int, int, int], config: Mapping[str, Any]) -> int:
    """Tokens that a transformer with this ``config`` cuts latents ``[C, T, H, W]`` into."""
    return math.prod(latent_shape[1:]) // math.prod(patch_shape(config))


def _bytes_each(half: bool) -> float:
    return MIXED_BYTES if half else FLOAT32_BYTES


def _blocks(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """The matrices of each of the transformer's repeated blocks."""
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if (match := re.match(r"\w*blocks\.\d+\.", name)) and is_matrix(name, shape):
            blocks.setdefault(match[0], {})[name[match.end() :]] = shape
    return blocks


def _held_by_block(shapes: Shapes, config: Mapping[str, Any], tokens: Tokens, factor: float) -> list[float]:
    """Numbers that each block has of one sample: ``factor`` times its features."""
    two = config.get("_class_name") in _TWO_STREAMS
    text, once = (_TEXT_STREAM, ("norm1",)) if two else (_TEXT, ())

    def count(name: str) -> int:
        return 1 if name.startswith(once) else tokens.text if name.startswith(text) else tokens.media

    return [
        factor * sum(count(name) * _features(shape) for name, shape in matrices.items())
        for matrices in _blocks(shapes).values()
    ]


def _features(shape: tuple[int, ...]) -> int:
    """That go into and come out of a matrix; a convolution by channel has one of each."""
    rows, columns = shape[:2]
    return rows + (rows if columns == 1 else columns)


_TWO_STREAMS = ("SD3Transformer2DModel",)
"""Transformers whose blocks take text along as tokens of its own, and a noise level that is one for all tokens."""
_TEXT_STREAM = ("attn.add_", "attn.to_add_out", "ff_context")
"""Matrices of their blocks that see the text."""
_TEXT = ("attn2.to_k", "attn2.to_v")
"""Matrices that see the text in blocks that look at it by attention."""
