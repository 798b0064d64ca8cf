"""The bytes that one rank of a stage holds, from shapes and settings alone: torch-free, so that a plan can tell.

Weights, copies, gradients and moments are counted. Activations are not: no file states how large they are.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cosmos_rl_core.parallel.parallelism import ALONE, Parallelism
from cosmos_rl_core.pipelines.sizes import FLOAT32_BYTES

Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by name."""

HALF_BYTES = 2


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


def in_half(shapes: Shapes, float32_modules: Collection[str]) -> int:
    """Return the bytes of these tensors as :mod:`cosmos_rl_core.weights.half_weights` leaves them.

    Matrices and adapters are of a half type, except in modules with one of the names ``float32_modules``; everything
    else is float32.
    """
    kept = set(float32_modules)

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


def _blocks(shapes: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """The matrices of each of the transformer's repeated blocks."""
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if (match := re.match(r"\w*blocks\.\d+\.", name)) and is_matrix(name, shape):
            blocks.setdefault(match[0], {})[name[match.end() :]] = shape
    return blocks
