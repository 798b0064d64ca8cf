"""Algorithms and models from outside that return what they must not: one error with their name, no artifact."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_rl_core.algorithms import nft
from cosmos_rl_core.algorithms._base import Loss
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._base import guided_velocity
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models.sd3 import model as sd3
from stages.artifacts.request import Request
from stages.generating.decoding import decode_finite
from tests.stages.conftest import make
from tests.stages.training.test_forward_passes import nft_recipe, scored

RIGHT = nft.Algorithm.loss


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Request:
    """An update on a scored rollout, not made."""
    return scored(nft_recipe(), tmp_path_factory.mktemp("wrong"))


def in_half(self: Any, velocity: Any, batch: Any) -> Loss:
    loss = RIGHT(self, velocity, batch)
    return Loss(loss.per_sample.bfloat16(), loss.metrics)


def one_number(self: Any, velocity: Any, batch: Any) -> Loss:
    loss = RIGHT(self, velocity, batch)
    return Loss(loss.per_sample.mean(), loss.metrics)


def in_place(self: Any, velocity: Any, batch: Any) -> Loss:
    loss = RIGHT(self, velocity, batch)
    batch.x_0.zero_()
    return loss


def mean_metric(self: Any, velocity: Any, batch: Any) -> Loss:
    loss = RIGHT(self, velocity, batch)
    return Loss(loss.per_sample, loss.metrics | {"share": loss.per_sample.detach().mean()})


LOSSES: dict[Callable[..., Loss], str] = {
    in_half: r"nft: loss\(\) must return float32 or float64, found torch.bfloat16",
    one_number: r"nft: loss\(\) must return one number per sample: found shape \[\]",
    in_place: r"nft: loss\(\) changes x_0 of its batch in place",
    mean_metric: r"nft: loss\(\) must return one number per sample in each metric; change: share",
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_returns_wrong_tensors_or_changes_its_batch_is_refused(
    loss: Callable[..., Loss], asked: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nft.Algorithm, "loss", loss)
    with pytest.raises(ConfigError, match=LOSSES[loss]):
        make(asked, tmp_path)


RANKED = nft.Algorithm.advantages
TABLES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a dropped row": (lambda table: table.iloc[1:], "returns 7 rows for 8 samples"),
    "another order": (lambda table: table.iloc[::-1], "or another order; expected a row for every sample, in order"),
    "no column": (lambda table: table.drop(columns="used"), "must return the columns used"),
}


@pytest.mark.parametrize("name", TABLES)
def test_wrong_tables_of_advantages_are_refused(
    name: str, asked: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = TABLES[name]
    monkeypatch.setattr(nft.Algorithm, "advantages", lambda self, samples: change(RANKED(self, samples)))
    with pytest.raises(ConfigError, match=f"algorithm 'nft': .*{expected}"):
        make(asked, tmp_path)


VELOCITIES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "one number per sample": (lambda x_t: x_t.mean((1, 2, 3), keepdim=True), r"returns \[2, 1, 1, 1\] for an x_t of"),
    "in place": (lambda x_t: x_t.mul_(2) + 1, "changes x_t in place"),
}


@pytest.mark.parametrize("name", VELOCITIES)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_velocity_of_a_wrong_shape_or_type_is_refused(
    name: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, expected = VELOCITIES[name]
    monkeypatch.setattr(sd3.StableDiffusion3, "velocity", lambda self, x_t, t, conditioning: change(x_t))
    model = sd3.StableDiffusion3.__new__(sd3.StableDiffusion3)
    x_t = torch.ones(2, 4, 4, 4, device="cpu")
    with pytest.raises(ConfigError, match=rf"models.sd3.model: velocity\(\) {expected}"):
        guided_velocity(model, x_t, torch.ones(2, device="cpu"), Conditioning({}), Conditioning({}), scale)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8, 4), (1, 1, 8, 8, 3), (2, 8, 8, 3)])
def test_pixels_of_a_wrong_shape_are_refused(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    monkeypatch.setattr(sd3.StableDiffusion3, "decode", lambda self, latents: pixels)
    model = sd3.StableDiffusion3.__new__(sd3.StableDiffusion3)
    with pytest.raises(ConfigError, match=r"decode\(\) returns uint8 .* expected uint8 \[B, frames"):
        decode_finite(model, torch.zeros(2, 4, 1, 1, device="cpu"), [True, True])
