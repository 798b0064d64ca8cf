"""Checksums by which ranks compare their tensors: what they find, and where they are computed."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cosmos_rl_core import seeds
from cosmos_rl_core.parallel import checksums as module
from cosmos_rl_core.parallel.checksums import checksums
from tests.other_device import DEVICE, OtherDevice

CPU = torch.device("cpu")
DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64, torch.uint8: torch.uint8}


def tensor_of(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.from_numpy(seeds.normal(shape, "checksum")) * 50).abs().to(dtype)


def of(tensor: Tensor) -> int:
    return checksums({"x": tensor})["x"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_of_every_element_is_found(dtype: torch.dtype):
    tensor = tensor_of(dtype, 5, 3)
    bits = tensor.reshape(-1).view(DTYPES[dtype])
    seen = {of(tensor)}
    for place in range(len(bits)):
        for bit in range(8 * bits.element_size()):
            changed = bits.clone()
            flip = 1 << bit if bit < 8 * bits.element_size() - 1 or dtype == torch.uint8 else -(1 << bit)
            changed[place] ^= flip
            seen.add(of(changed.view(dtype).view(5, 3)))
    assert len(seen) == 1 + 8 * bits.element_size() * len(bits)


def test_a_flipped_bit_is_found_in_any_part_of_a_long_tensor(monkeypatch: pytest.MonkeyPatch):
    tensor = tensor_of(torch.float32, 1000)
    whole = of(tensor)
    monkeypatch.setattr(module, "CHECKSUM_WORDS", 64)
    assert of(tensor) == whole
    for place in (0, 63, 64, 999):
        changed = tensor.clone()
        changed[place] = -changed[place]
        assert of(changed) != whole


def test_swapped_elements_are_found_at_every_distance():
    tensor = torch.arange(64, dtype=torch.float32, device=CPU)
    seen = {of(tensor)}
    pairs = [(a, b) for a in range(64) for b in range(a)]
    for a, b in pairs:
        changed = tensor.clone()
        changed[a], changed[b] = tensor[b], tensor[a]
        seen.add(of(changed))
    assert len(seen) == 1 + len(pairs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_flipped_signs_do_not_cancel(dtype: torch.dtype):
    tensor = tensor_of(torch.float32, 40).to(dtype)
    bits = tensor.view(DTYPES[dtype])
    highest = 128 if dtype == torch.uint8 else -(1 << (8 * bits.element_size() - 1))
    for a in range(40):
        for b in range(a):
            changed = bits.clone()
            changed[a] ^= highest
            changed[b] ^= highest
            assert of(changed) != of(bits)


def test_swapped_tensors_are_found_and_lengths_of_zeros_differ():
    one, other = tensor_of(torch.float32, 4), tensor_of(torch.float32, 4) + 1
    assert checksums({"a": one, "b": other}) != checksums({"a": other, "b": one})
    lengths = [of(torch.zeros(n, device=CPU)) for n in range(9)]
    assert all(a != b for a, b in pairwise(lengths))


def test_signs_of_zeros_and_payloads_of_nans_are_bits_too():
    assert of(torch.tensor([0.0], device=CPU)) != of(torch.tensor([-0.0], device=CPU))
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32, device=CPU).view(torch.float32)
    assert of(nans[:1]) != of(nans[1:])


def test_checksums_are_computed_where_the_tensors_lie_with_one_read_a_device():
    tensors = {"a": tensor_of(torch.float32, 7), "b": tensor_of(torch.bfloat16, 3, 2)}
    expected = checksums(tensors)
    with OtherDevice():
        there = {"a": tensors["a"].to(DEVICE), "b": tensors["b"]}
        assert checksums(there) == expected
