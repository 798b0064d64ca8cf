"""Sizes that no transformer can work on, whatever it has positions for."""

import math
from pathlib import Path

import pytest

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import sizes

MOST = math.isqrt(sizes.MAX_TOKENS)


@pytest.fixture
def sana(tmp_path: Path) -> str:
    """SANA has no positions, or such as are made for the size."""
    return str(tiny_pipelines.save("sana", tmp_path / "sana"))


def test_a_sample_of_too_many_tokens_is_refused_where_there_is_no_bound_by_positions(sana: str):
    with pytest.raises(ConfigError, match=r"inference_size \[64000, 160000\] .* at most 1048576 are possible here"):
        sizes.latent_shape(sana, (64000, 160000), 1)


def test_the_bound_counts_tokens(sana: str):
    side = 32 * MOST // math.isqrt(sizes.num_tokens(sana, (32, 32), 1))
    _, _, height, width = sizes.latent_shape(sana, (side, side), 1)
    assert height == width == side // (32 // sizes.latent_shape(sana, (32, 32), 1)[2])
    with pytest.raises(ConfigError, match="tokens a sample, at most 1048576 are possible here; lower them"):
        sizes.latent_shape(sana, (side, side + 32), 1)


@pytest.mark.parametrize("family", ["sd3", "sana", "sana_video", "wan", "cosmos_predict2_5"])
def test_no_family_takes_an_absurd_size(family: str, tmp_path: Path):
    folder = str(tiny_pipelines.save(family, tmp_path / family))
    with pytest.raises(ConfigError, match="tokens"):
        sizes.latent_shape(folder, (64000, 160000), 1)
