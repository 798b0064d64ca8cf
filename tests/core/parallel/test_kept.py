"""Modules that a process keeps between stages: what is shared, what never is, and how much is kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.conformance.models.families import Family
from cosmos_rl_core.models import _loading
from cosmos_rl_core.parallel.kept import KEPT, KeptModules, Source, bytes_of
from cosmos_rl_core.weights.policy_weights import prepare

CPU = torch.device("cpu")
PARTS = ("transformer", "vae", "text")
BYTES = 4 * (3 * 2 + 2 + 1)
"""Bytes of a tied module."""


class Tied(nn.Module):
    """A weight under two names, and a buffer."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False, device=CPU)
        nn.init.constant_(self.first.weight, value)
        self.second = nn.Linear(3, 2, bias=False, device=CPU)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.zeros(2, device=CPU))
        self.plain = torch.ones(1, device=CPU)
        self.requires_grad_(False)


@pytest.fixture
def kept() -> KeptModules:
    """Room for two tied modules."""
    found = KeptModules()
    found.limit_bytes = 2 * BYTES
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One with a file."""
    (tmp_path / "weights").write_bytes(b"1")
    return tmp_path


@pytest.fixture
def of_this_process() -> Iterator[KeptModules]:
    """What loading uses, with room."""
    KEPT.limit_bytes = 2**30
    yield KEPT
    KEPT.limit_bytes = 0
    KEPT.clear()


def never() -> nn.Module:
    raise AssertionError("it is kept, and was read again")


def test_modules_of_one_source_share_weights_and_nothing_else(kept: KeptModules, folder: Path):
    source = Source(Tied, folder, {"dtype": torch.float32})
    first = kept.get(source, Tied)
    second = kept.get(source, never)
    assert isinstance(first, Tied)
    assert isinstance(second, Tied)
    assert first.first.weight.data_ptr() == second.first.weight.data_ptr()
    assert second.first.weight is second.second.weight
    first.first.weight.requires_grad_(True)
    first.first.register_forward_hook(lambda *_: None)
    first.first.weight.data = first.first.weight.data.half()
    first.get_buffer("table").fill_(1.0)
    third = kept.get(source, never)
    assert isinstance(third, Tied)
    assert third.first.weight.dtype == torch.float32
    assert not third.first.weight.requires_grad
    assert not third.first._forward_hooks
    assert third.get_buffer("table").tolist() == [0.0, 0.0]


def test_a_module_that_has_its_weights_for_itself_changes_no_other(kept: KeptModules, folder: Path):
    source = Source(Tied, folder, {})
    other, trained = kept.get(source, Tied), kept.get(source, never)
    kept.own(trained)
    kept.own(trained)
    assert kept.num_bytes == 0
    trained.get_parameter("first.weight").add_(1.0)
    assert trained.get_parameter("second.weight").mean() == 1.0
    assert other.get_parameter("first.weight").sum() == 0.0
    assert kept.get(source, Tied).get_parameter("first.weight").sum() == 0.0


def test_weights_are_handed_over_without_a_copy_where_nobody_else_has_them(kept: KeptModules, folder: Path):
    source = Source(Tied, folder, {})
    trained = kept.get(source, Tied)
    place = trained.get_parameter("first.weight").data_ptr()
    kept.own(trained)
    assert trained.get_parameter("first.weight").data_ptr() == place
    assert kept.tensors == []


def test_cast_weights_are_kept_as_cast_and_apart_from_the_original_ones(kept: KeptModules, folder: Path):
    source = Source(Tied, folder, {})
    with kept.form("half"):
        cast = kept.get(source, lambda: Tied(0.5))
        cast.get_parameter("first.weight").data = cast.get_parameter("first.weight").data.half()
        kept.adopt(cast)
        again = kept.get(source, never)
    weight = again.get_parameter("second.weight")
    assert (weight.dtype, weight.float().mean()) == (torch.float16, 0.5)
    assert weight.data_ptr() == cast.get_parameter("first.weight").data_ptr()
    assert kept.num_bytes == 2 * 3 * 2 + 4 * (2 + 1)
    assert kept.changed() == []
    assert kept.get(source, lambda: Tied(2.0)).get_parameter("first.weight").dtype == torch.float32


def test_a_kept_weight_that_is_written_to_is_named(kept: KeptModules, folder: Path):
    poisoned = kept.get(Source(Tied, folder, {}), Tied)
    assert kept.changed() == []
    poisoned.get_parameter("first.weight")[1, 2] = -0.0
    assert kept.changed() == ["Tied.first.weight"]


@pytest.mark.parametrize("change", ["another file", "another time", "another option"])
def test_a_source_that_differs_in_anything_is_read(kept: KeptModules, folder: Path, change: str):
    kept.get(Source(Tied, folder, {}), Tied)
    if change == "another file":
        (folder / "more").touch()
    if change == "another time":
        (folder / "weights").write_bytes(b"2")
    source = Source(Tied, folder, {"dtype": torch.float16} if change == "another option" else {})
    assert kept.get(source, lambda: Tied(2.0)).get_parameter("first.weight").mean() == 2.0


def test_the_module_that_was_used_longest_ago_makes_room(kept: KeptModules, folder: Path):
    sources = [Source(Tied, folder, {"number": number}) for number in range(3)]
    for source in (*sources[:2], sources[0], sources[2]):
        kept.get(source, Tied)
    assert kept.num_bytes == 2 * BYTES
    kept.get(sources[0], never)
    kept.get(sources[2], never)
    assert kept.get(sources[1], lambda: Tied(3.0)).get_parameter("first.weight").mean() == 3.0


def test_nothing_is_kept_that_is_larger_than_the_limit_and_nothing_without_one(kept: KeptModules, folder: Path):
    source = Source(Tied, folder, {})
    for limit in (BYTES - 1, 0):
        kept.limit_bytes = limit
        assert kept.get(source, lambda: Tied(1.0)) is not kept.get(source, lambda: Tied(1.0))
        assert kept.num_bytes == 0


def test_parts_of_a_pipeline_have_the_bits_of_their_files_again(family: Family, of_this_process: KeptModules):
    path = str(family.folder)
    of_this_process.limit_bytes = 0
    plain = _loading.load_parts(path, PARTS, CPU)
    of_this_process.limit_bytes = 2**30
    for _ in range(2):
        for name, part in _loading.load_parts(path, PARTS, CPU).items():
            assert not part.training
            state = part.state_dict()
            assert all(torch.equal(state[key], tensor) for key, tensor in plain[name].state_dict().items())
            assert [*state] == [*plain[name].state_dict()]
        assert of_this_process.num_bytes == sum(map(bytes_of, plain.values()))
    assert of_this_process.changed() == []


def test_an_adapter_of_one_stage_is_not_in_the_next(family: Family, of_this_process: KeptModules):
    path, lora = str(family.folder), LoraConfig(r=2, target_modules=("to_q",))
    first = _loading.load_parts(path, ("transformer",), CPU)["transformer"]
    names = [*first.state_dict()]
    prepare(first, lora, reference=False)
    assert len(first.state_dict()) > len(names)
    assert [*_loading.load_parts(path, ("transformer",), CPU)["transformer"].state_dict()] == names
    assert of_this_process.changed() == []
