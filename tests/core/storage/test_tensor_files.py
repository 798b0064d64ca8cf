"""Our safetensors files equal the format's own writer's byte for byte; what is none is refused."""

import io
import json
import struct

import pytest
import torch
from safetensors import torch as safetensors_torch
from torch import Tensor

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage.tensor_files import decode, encode, file_of, read_tensors, spec_of
from cosmos_rl_core.storage.tensor_headers import NUM_BYTES, num_bytes, read_header

DTYPES = [
    torch.uint64, torch.int64, torch.float64, torch.float32, torch.uint32, torch.int32, torch.bfloat16, torch.float16,
    torch.uint16, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def one_of_each() -> dict[str, Tensor]:
    """Tensors of all types, in an order of their own; also empty ones, numbers, and names that JSON escapes."""
    tensors = {f"t{7 * n % 15:02d}": torch.arange(5, device="cpu").to(dtype) for n, dtype in enumerate(DTYPES)}
    return tensors | {
        'é"\\\n': torch.ones(2, 3, device="cpu"),
        "number": torch.tensor(3.5, device="cpu"),
        "empty": torch.empty(0, 4, device="cpu"),
    }


def make(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    specs = {name: spec_of(tensor) for name, tensor in reversed(tensors.items())}
    return b"".join(file_of(specs, tensors.__getitem__, metadata))


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"lora": '{"r": 4}'}])
def test_files_equal_the_formats_own_writers(metadata: dict[str, str]):
    tensors = one_of_each()
    assert {spec_of(tensor)[0] for tensor in tensors.values()} == NUM_BYTES.keys()
    content = make(tensors, metadata)
    assert content == safetensors_torch.save(tensors, metadata or None)
    found = dict(read_tensors(io.BytesIO(content)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert spec_of(found[name]) == spec_of(tensor)
        assert bytes(encode(found[name])) == bytes(encode(tensor))
        assert len(encode(tensor)) == num_bytes(*spec_of(tensor))


def test_views_are_written_with_the_values_that_they_show():
    base = torch.arange(12.0, device="cpu").reshape(3, 4)
    for view in (base.T, base[:, 1:3], base[1]):
        again = decode(bytes(encode(view)), *spec_of(view))
        assert torch.equal(again, view)


def test_a_tensor_that_is_not_as_announced_is_refused():
    with pytest.raises(ArtifactError, match=r"a is \('F32', \(2,\)\), expected \('F32', \(3,\)\)"):
        b"".join(file_of({"a": ("F32", (3,))}, lambda _: torch.zeros(2, device="cpu"), {}))


def header_of(entries: object) -> bytes:
    data = json.dumps(entries).encode()
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 100, "not a safetensors file"),
        (header_of([1]), "not a safetensors file"),
        (header_of({"a": {"dtype": "F32"}}), "not a safetensors file"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}), "have gaps or overlap"),
        (header_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "it ends inside tensor a"),
        (header_of({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}) + b"1234", "unknown tensor type 'F4'"),
    ],
)
def test_other_bytes_are_no_safetensors_file(data: bytes, words: str):
    with pytest.raises(ArtifactError, match=words):
        list(read_tensors(io.BytesIO(data)))


def test_entries_come_in_the_order_of_their_bytes():
    content = make(one_of_each(), {"format": "pt"})
    entries = read_header(io.BytesIO(content))
    assert [entry.start for entry in entries] == sorted(entry.start for entry in entries)
    assert entries[-1].end == len(content)
