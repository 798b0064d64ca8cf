"""A pipeline counted without its weights."""

import math
from pathlib import Path

import pytest
import torch

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.weights import counter, counting
from cosmos_rl_core.weights.shapes import weight_shapes

META = torch.device("meta")


def test_a_transformer_may_read_the_lengths_of_texts():
    with counter.FullTexts(7):
        assert torch.ones(2, 7, device=META).sum(dim=1).tolist() == [7, 7]


@pytest.mark.slow
def test_a_process_of_its_own_counts_for_callers_without_torch():
    path = sizes.directories.resolve_path("package:tiny-sd3")
    shapes = counting.shapes(path)
    assert shapes["transformer"] == weight_shapes(path)
    assert counting.forward_flops(path, (32, 64), 1, 8) > 2 * math.prod(shapes["transformer"]["proj_out.weight"])


@pytest.mark.slow
def test_a_config_that_cannot_be_built_is_a_mistake(tmp_path: Path):
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "StableDiffusion3Pipeline", "vae": ["diffusers", "No"]}'
    )
    with pytest.raises(ConfigError, match="cannot be built from its config files: "):
        counting.shapes(str(tmp_path))
