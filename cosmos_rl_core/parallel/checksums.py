"""Checksums of tensors, computed on the device of the tensors, by which ranks compare their tensors.

They detect accidents: they tell whether two ranks have equal bits. They do not replace the digest of a file.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cosmos_rl_core.pipelines.memory import CHECKSUM_WORDS

_ODD = -7046029254386353131
"""An odd number near 2^64 over the golden ratio, as a signed integer."""
_MIXED = -4417276706812531889


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a 64-bit checksum of each tensor's bits by name. Waits for the device once.

    A checksum is the sum of words of at most 32 bits times odd multipliers of 64 bits by position, modulo 2^64, plus
    the number of words. An odd multiplier has an inverse, so tensors that differ in one word always differ in their
    checksum, whichever of its bits are flipped. Other accidental differences, of two words that change places or of any
    number of words, are missed with a chance of at most about 2^-32. Somebody could construct differences that are
    missed.
    """
    names = sorted(tensors)
    by_device: dict[torch.device, list[str]] = {}
    for name in names:
        by_device.setdefault(tensors[name].device, []).append(name)
    found: dict[str, int] = {}
    for some in by_device.values():
        sums = torch.stack([_checksum(tensors[name]) for name in some]).cpu().tolist()
        found |= dict(zip(some, sums, strict=True))
    return {name: found[name] for name in names}


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    words = _words(tensor)
    total = torch.full((), len(words), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), CHECKSUM_WORDS):
        some = words[first : first + CHECKSUM_WORDS]
        place = torch.arange(first, first + len(some), device=tensor.device)
        # Not linear in the place, so that equal distances do not have equal differences of multipliers.
        mixed = (place + 1) * _ODD
        multiplier = (mixed ^ (mixed >> 29)) * _MIXED | 1
        # Integers wrap around, and their sum does not depend on its order.
        total = total + (some.long() * multiplier).sum()
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of at most 32 bits, flat.

    Words of 64 bits would let two flipped signs cancel: the product of 2^63 with every odd number is the same.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
