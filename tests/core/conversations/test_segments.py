"""Attention by segments compared with a loop over tokens, what it computes, and how often it waits for numbers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cosmos_rl_core.conversations import segments

CPU = torch.device("cpu")
LENGTHS = (5, 1, 3, 5, 2)
CAUSAL: Any = SimpleNamespace(is_causal=True, num_key_value_groups=2)
"""What is read of the module that attends."""


class Calls(TorchDispatchMode):
    """Notes the operations of some names, with their arguments."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.found = names, list[tuple[Any, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.names):
            self.found.append(args)
        return func(*args, **(kwargs or {}))


def states(
    rows: int, heads: tuple[int, int], tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; ``heads`` of queries, and of keys and values."""
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(rows, tokens, number, 8, dtype=dtype, generator=drawn).transpose(1, 2).requires_grad_()
        for number in (heads[0], heads[1], heads[1])
    )
    return query, key, value


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    return segments.attend(CAUSAL, query, key, value, mask, **settings)[0]


def by_tokens(query: Tensor, key: Tensor, value: Tensor, *, sees: Callable[[int, int], bool]) -> Tensor:
    """Attention from its definition, ``[rows, tokens, heads, width]``; ``sees`` of all tokens of all rows in order."""
    rows, heads, tokens, width = query.shape
    made: list[Tensor] = []
    for row in range(rows):
        for place in range(tokens):
            seen = [other for other in range(tokens) if sees(row * tokens + place, row * tokens + other)]
            for head in range(heads):
                group = head * key.shape[1] // heads
                scores = key[row, group, seen] @ query[row, head, place] * width**-0.5
                made.append(scores.softmax(0) @ value[row, group, seen])
    return torch.stack(made).unflatten(0, (rows, tokens, heads))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_a_token_attends_within_its_segment_alone(causal: bool, window: int | None):
    """In two rows, with two heads of queries to one of keys; the window is causal attention's."""
    owners = [number for number, length in enumerate((*LENGTHS, *LENGTHS)) for _ in range(length)]
    inputs = states(2, (4, 2), sum(LENGTHS), torch.float64)

    def sees(place: int, other: int) -> bool:
        near = not causal or (other <= place and (window is None or place - other < window))
        return owners[place] == owners[other] and near

    borders = segments.borders(torch.tensor([*LENGTHS, *LENGTHS]), CPU)
    found = attended(*inputs, is_causal=causal, sliding_window=window, **borders)
    expected = by_tokens(*inputs, sees=sees)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
    weights = torch.arange(8, dtype=found.dtype)
    for ours, theirs in zip(
        torch.autograd.grad((found @ weights).square().sum(), inputs),
        torch.autograd.grad((expected @ weights).square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-8)


def test_a_row_costs_as_much_as_its_segments_together():
    inputs = states(1, (2, 2), sum(LENGTHS))
    with Calls("_scaled_dot_product_flash_attention_for_cpu.default") as calls:
        attended(*inputs, **segments.borders(torch.tensor(LENGTHS), CPU))
    assert [(query.shape[0], query.shape[2], key.shape[2]) for query, key, *_ in calls.found] == [
        (2, 5, 5),
        (1, 1, 1),
        (1, 3, 3),
        (1, 2, 2),
    ]


def test_one_segment_has_the_bits_of_plain_attention():
    inputs = states(1, (4, 2), 7)
    assert segments.borders(torch.tensor([7]), CPU) == {}
    plain = attended(*inputs)
    ends = torch.tensor([0, 7], dtype=torch.int32)
    found = attended(*inputs, cu_seq_lens_q=ends, max_length_q=7)
    assert torch.equal(found, plain)


def test_segments_of_one_length_have_the_bits_of_each_alone():
    query, key, value = states(1, (2, 2), 30)
    found = attended(query, key, value, **segments.borders(torch.tensor([10, 10, 10]), CPU))
    pieces = (tensor.split(10, dim=2) for tensor in (query, key, value))
    alone = [attended(*piece) for piece in zip(*pieces, strict=True)]
    assert torch.equal(found, torch.cat(alone, dim=1))


def test_a_mask_or_dropout_in_segments_is_refused():
    inputs, borders = states(1, (2, 2), 4), segments.borders(torch.tensor([1, 3]), CPU)
    with pytest.raises(ValueError, match="neither a mask nor dropout"):
        attended(*inputs, mask=torch.ones(1, 1, 4, 4, dtype=torch.bool), **borders)
    with pytest.raises(ValueError, match="neither a mask nor dropout"):
        attended(*inputs, dropout=0.1, **borders)


def on_gpu(dtype: torch.dtype, width: int) -> tuple[list[tuple[Any, ...]], Tensor]:
    """What kernels tensors without numbers, which claim to be on a GPU, are given; and what they return."""
    with FakeTensorMode(), Calls("_varlen_attn.default", "_softmax") as calls:
        query, key, value = (torch.empty(1, heads, 16, width, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        ends = torch.empty(6, dtype=torch.int32, device="cuda")
        setattr(ends, "_lengths", list(LENGTHS))  # noqa: B010
        found = attended(query, key, value, scaling=0.5, cu_seq_lens_q=ends, max_length_q=5)
    return calls.found, found


def lengths_in(calls: list[tuple[Any, ...]]) -> list[int]:
    """Return the lengths of the segments whose scores were made, a call for each length."""
    return [scores.shape[-1] for scores, *_ in calls]


@pytest.mark.parametrize("capability", [(9, 0), (7, 5)])
def test_half_precision_takes_one_call_of_the_kernel_on_gpus_that_have_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    calls, found = on_gpu(torch.bfloat16, 64)
    assert (found.dtype, found.shape) == (torch.bfloat16, (1, 16, 4, 64))
    if capability < (8, 0):
        assert lengths_in(calls) == [5, 1, 3, 2]
        return
    ((query, key, value, ends, also, longest, _, causal, scaling, window, grouped, *_),) = calls
    assert [tuple(one.shape) for one in (query, key, value)] == [(16, 4, 64), (16, 2, 64), (16, 2, 64)]
    assert ends is also
    assert (longest, causal, scaling, window, grouped) == (5, True, 0.5, [-1, 0], True)


def test_the_kernel_gets_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    # Not the context, which looks for a GPU.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        ((query, key, value, *_),), found = on_gpu(torch.float32, 64)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert {one.dtype for one in (query, key, value, found)} == {torch.bfloat16}


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.bfloat16, 20)])
def test_inputs_that_the_kernel_does_not_take_are_attended_in_blocks(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    calls, _ = on_gpu(dtype, width)
    assert lengths_in(calls) == [5, 1, 3, 2]
