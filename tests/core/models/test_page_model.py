"""The model of the page, written to a folder as a reader would: it is the stock pipeline, as the suite has it."""

from collections.abc import Iterator

import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import SIZE, Family, load_family
from cosmos_rl_core.conformance.models.test_against_stock import (  # noqa: F401
    test_our_euler_is_the_stock_pipeline_with_an_euler_scheduler,
    test_the_transformer_is_fed_what_the_stock_pipeline_feeds_it,
)
from cosmos_rl_core.outside_plugins import find
from cosmos_rl_core.pipelines import sizes
from tests.pages import examples, write

NAME = "aura_flow"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp("page")
    write(folder, examples("model.md"))
    find([str(folder / NAME)])
    # The fixture has the suite's name: the tests imported above run on this family.
    yield load_family(NAME, str(tiny_pipelines.save(NAME, folder / "tiny")))
    find([])


def test_the_documented_model_claims_a_stock_pipeline_and_counts_its_latents(family: Family):
    assert plugins.load("models", NAME).SPEC.pipeline_classes == (type(family.stock).__name__,)
    # 32 x 64 pixels, 2 a latent.
    assert sizes.latent_shape(family.folder, SIZE, 1) == (4, 1, 16, 32)


def test_pictures_of_the_documented_model_survive_the_vae(family: Family):
    latents = torch.stack([family.noise[0], family.noise[1]])
    pixels = family.model.decode(latents)
    assert pixels.shape == (2, 1, *SIZE, 3)
    assert family.model.encode_media(pixels).shape == latents.shape
