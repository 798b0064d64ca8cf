"""Guidance that a transformer takes as an input: which models, and which losses."""

from pathlib import Path

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import Family, load_family
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import guidance


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tiny_pipelines.save("flux", tmp_path_factory.mktemp("schnell"), guidance_embeds=False)
    return load_family("flux", str(folder))


def test_guidance_is_an_input_of_dev_alone(schnell: Family, tmp_path: Path):
    dev = str(tiny_pipelines.save("flux", tmp_path))
    assert guidance.embedded_scale(dev, None) == 3.5
    assert guidance.embedded_scale(dev, 2.0) == 2.0
    assert guidance.embedded_scale(schnell.folder, None) is None
    with pytest.raises(ConfigError, match=r"embedded_guidance_scale = 2\.0: the transformer of this FluxPipeline"):
        guidance.embedded_scale(schnell.folder, 2.0)


def test_losses_on_media_have_a_guidance_of_their_own(schnell: Family, tmp_path: Path):
    dev = str(tiny_pipelines.save("flux", tmp_path))
    assert guidance.supervised_scale(dev, None, 3.5) == 1.0
    assert guidance.supervised_scale(dev, 2.0, 3.5) == 2.0
    # The same value is none of its own, so runs from before there was one keep their identity.
    assert guidance.supervised_scale(dev, 3.5, 3.5) is None
    assert guidance.supervised_scale(schnell.folder, None, None) is None
    with pytest.raises(ConfigError, match=r"supervised_guidance_scale = 2\.0: the transformer of this FluxPipeline"):
        guidance.supervised_scale(schnell.folder, 2.0, None)
