"""Sizes that media of several ratios are trained on, and every model plugin on another size than its own."""

import json
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest
import torch

from cosmos_rl_core import seeds
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import SCHEDULERS, SIZE, Family, run_stock
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models import _loading
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.pipelines.buckets import RATIOS, Size, buckets, nearest, of_area
from cosmos_rl_core.sampling.rollout import sample
from cosmos_rl_core.sampling.solvers import kernel_of

SQUARE = of_area((1024, 1024), (16, 16))


def test_buckets_of_a_megapixel_and_of_480p_are_these():
    """Written down, because they are part of what latents are made of."""
    wide = [(880, 1168), (832, 1248), (768, 1360)]
    assert ((1024, 1024), *(size for one in wide for size in (one, one[::-1]))) == SQUARE
    wide = [(544, 720), (512, 768), (480, 832)]
    assert of_area((480, 832), (16, 16)) == ((624, 624), *(size for one in wide for size in (one, one[::-1])))


@pytest.mark.parametrize("multiples", [(16, 16), (32, 32), (32, 8)])
@pytest.mark.parametrize(
    "size",
    [(1024, 1024), (512, 512), (480, 832), (704, 1280), (1280, 704), (768, 1024), (32, 64), (32, 32), (64, 1024)],
)
def test_no_bucket_is_larger_than_the_size_that_memory_is_planned_for(size: Size, multiples: Size):
    found = of_area(size, multiples)
    area = size[0] * size[1]
    assert size in found
    assert len(set(found)) == len(found) <= len(RATIOS)
    for height, width in found:
        assert height % multiples[0] == width % multiples[1] == 0
        assert 0 < height * width <= area
    if multiples[0] == multiples[1]:
        assert {bucket[::-1] for bucket in found} == {*found}
    if area >= 480 * 832 and size != (64, 1024):
        assert len(found) == 7
        assert min(height * width for height, width in found) > 0.92 * area
        off = [abs(Fraction(w, h) / nearest_ratio - 1) for h, w in found for nearest_ratio in [near((h, w))]]
        assert max(off) < 0.04


def near(size: Size) -> Fraction:
    return min(RATIOS, key=lambda ratio: abs(Fraction(size[1], size[0]) / ratio - 1))


def test_a_medium_goes_to_the_bucket_of_the_nearest_ratio_whatever_else_differs():
    assert [nearest(SQUARE, size) for size in ((4000, 6000), (6000, 4000), (10, 10), (1080, 1920), (900, 1200))] == [
        (832, 1248), (1248, 832), (1024, 1024), (768, 1360), (880, 1168),
    ]  # fmt: skip
    assert nearest(SQUARE, (1, 100_000)) == (768, 1360)
    assert nearest(SQUARE, (100_000, 1)) == (1360, 768)
    # Exactly between two, in whole numbers: sqrt(1 x 4) is 2. The first of both.
    assert nearest(((10, 10), (10, 40)), (10, 20)) == (10, 10)
    assert nearest(((10, 40), (10, 10)), (10, 20)) == (10, 40)
    cut = [max(Fraction(w, h) / Fraction(b[1], b[0]), Fraction(b[1], b[0]) / Fraction(w, h)) for h, w, b in every()]
    assert max(cut) < 1.17


def every() -> list[tuple[int, int, Size]]:
    """Pictures between 16:9 and 9:16, each with its bucket."""
    return [(1000, width, nearest(SQUARE, (1000, width))) for width in range(563, 1778)]


@torch.no_grad()
def test_every_model_predicts_on_its_buckets_as_the_stock_pipeline_does(
    family: Family, monkeypatch: pytest.MonkeyPatch
):
    """Also with noise levels that the pipeline shifts by the size."""
    found = buckets(family.folder, SIZE, family.frames)
    assert SIZE in found[1:-1]
    # The one that is most like a square, and the tallest; the widest is the size of all other tests.
    for size in (found[0], found[-1]):
        shape = (len(family.noise), *family.model.latent_shape(size, family.frames))
        noise = torch.from_numpy(seeds.normal(shape, "bucket")).to(family.device)
        arguments = _loading.stock_arguments(family.stock, size, family.frames)
        run_stock(family.stock, noise, **arguments)
        levels = torch.as_tensor(family.model.schedule(5, size, family.frames).sigmas)
        assert torch.allclose(levels, family.stock.scheduler.sigmas.cpu().to(levels.dtype), atol=1e-6)
        with monkeypatch.context() as patched:
            patched.setattr(family.stock, "scheduler", SCHEDULERS["euler"]())
            expected = run_stock(family.stock, noise, **arguments)
            with mock.patch.object(family.model, "scheduler", family.stock.scheduler):
                steps = kernel_of(
                    SolverConfig(solver="euler", num_steps=5),
                    lambda size=size: family.model.schedule(5, size, family.frames),
                )
        ours = sample(family.at(size).velocity(), noise, steps).latents
        assert (ours - expected).abs().max() < 1e-4


def test_a_model_without_positions_for_a_bucket_is_refused(tmp_path: Path):
    folder = tiny_pipelines.save("sd3", tmp_path / "sd3")
    config = json.loads((folder / "transformer/config.json").read_text(encoding="utf-8"))
    side = sizes.multiples(str(folder))[0] * config["pos_embed_max_size"]
    sizes.latent_shape(str(folder), (side, side), 1)
    with pytest.raises(ConfigError, match=rf"inference_size \[{side}, {side}\], which this model does not take: .*pos"):
        buckets(str(folder), (side, side), 1)
    with pytest.raises(ConfigError, match="must be multiples of"):
        buckets(str(folder), (side + 1, side), 1)
