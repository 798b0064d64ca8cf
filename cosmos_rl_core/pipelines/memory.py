"""The bytes that one rank of a stage holds, from shapes and settings alone: torch-free, so that plans can compute them.

Weights, copies, gradients and optimizer moments are counted. Activations are not: no file states their size.
"""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cosmos_rl_core.config.parallelism import ALONE, Parallelism
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES, Shapes

HALF_BYTES = 2
CHECKSUM_WORDS, CHECKSUM_BYTES = 2**24, 40
"""Number of words of a tensor whose checksum is computed at once, and the bytes that each word takes meanwhile."""
BytesEach = Callable[[str, tuple[int, ...]], int]
"""Function from the name and the shape of a tensor to the bytes of each of its numbers."""


@dataclass(frozen=True)
class Spread:
    """The division of a transformer's weights among the ranks of a stage, and their precision."""

    parallelism: Parallelism = ALONE
    half: bool = False
    """Whether autocast computes in a half type."""


@dataclass(frozen=True)
class Bytes:
    """Memory of the first rank. No other rank has more rows of a sharded weight."""

    device: int = 0
    """Bytes on the device that computes."""
    cpu: int = 0
    """Bytes in the CPU's memory."""

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(self.device + other.device, self.cpu + other.cpu)

    def __mul__(self, times: int) -> "Bytes":
        return Bytes(self.device * times, self.cpu * times)


def resting(shapes: Shapes, spread: Spread, bytes_each: BytesEach = lambda *_: FLOAT32_BYTES) -> Bytes:
    """Return the bytes of one copy of these tensors between forward passes, by default in float32.

    :func:`cosmos_rl_core.parallel.sharding.shard` cuts matrices by rows, and with ``fsdp_offload`` keeps them in the
    CPU's memory; every other tensor is whole on each rank.
    """
    whole = cut = 0
    ranks = spread.parallelism.dp_shard_size
    for name, shape in shapes.items():
        if ranks > 1 and is_matrix(name, shape):
            cut += -(-shape[0] // ranks) * math.prod(shape[1:]) * bytes_each(name, shape)
        else:
            whole += math.prod(shape) * bytes_each(name, shape)
    on_cpu = cut if spread.parallelism.fsdp_offload else 0
    return Bytes(whole + cut - on_cpu, on_cpu)


def in_half(shapes: Shapes, float32_modules: Collection[str]) -> int:
    """Return the bytes of these tensors after :mod:`cosmos_rl_core.weights.half_weights`.

    Matrices and adapters have a half type, except in modules with one of the names ``float32_modules``; every other
    tensor is float32.
    """
    bytes_each = halved(float32_modules, lambda name, shape: is_matrix(name, shape) or ".lora_" in name)
    return sum(math.prod(shape) * bytes_each(name, shape) for name, shape in shapes.items())


def halved(float32_modules: Collection[str], is_cast: Callable[[str, tuple[int, ...]], bool]) -> BytesEach:
    """Return a function from a tensor to the bytes of each of its numbers: 2 if the tensor is cast, else 4.

    Tensors of modules with a name in ``float32_modules`` are not cast.
    """
    kept = set(float32_modules)
    return lambda name, shape: HALF_BYTES if is_cast(name, shape) and not kept & set(name.split(".")) else FLOAT32_BYTES


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the weight of a linear or convolution module of the base model."""
    return name.endswith(".weight") and len(shape) > 1 and ".lora_" not in name


BLOCK = r"\w*blocks\.\d+\."
"""Beginning of the names of the weights of a repeated block in diffusers, a regular expression."""


def visiting(
    shapes: Shapes,
    spread: Spread,
    *,
    backward: bool,
    all_train: bool,
    checkpointing: bool = False,
    block: str = BLOCK,
) -> int:
    """Return the bytes of the copies of matrices that a forward or ``backward`` pass makes.

    Sharded matrices are gathered: those outside the blocks and, because the next block is fetched during the current
    one, the two largest blocks. With ``backward`` and ``all_train`` add float32 gradients of one block and of the
    matrices outside blocks. A rank with whole weights casts them for autocast: one block at a time, all blocks in a
    backward pass without ``checkpointing``, and all matrices if they train, because autocast caches those casts.
    """
    blocks = _blocks(shapes, block).values()
    largest, every = max(blocks, default=0), sum(blocks)
    root = sum(math.prod(shape) for name, shape in shapes.items() if is_matrix(name, shape)) - every
    bytes_each = HALF_BYTES if spread.half else FLOAT32_BYTES
    if spread.parallelism.dp_shard_size > 1:
        gradients = FLOAT32_BYTES * (root + largest) if backward and all_train else 0
        return bytes_each * (root + min(2 * largest, every)) + gradients
    if not spread.half:
        return 0
    if all_train:
        return bytes_each * (root + every)
    return bytes_each * (every if backward and not checkpointing else largest)


def _blocks(shapes: Shapes, block: str) -> dict[str, int]:
    """Return the number of elements of the matrices of each of the transformer's repeated blocks."""
    blocks: dict[str, int] = {}
    for name, shape in shapes.items():
        if (match := re.match(block, name)) and is_matrix(name, shape):
            blocks[match[0]] = blocks.get(match[0], 0) + math.prod(shape)
    return blocks
