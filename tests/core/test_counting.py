"""A pipeline counted without its weights."""

import math
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._conditioning import Conditioning
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.weights import counter, counting
from cosmos_rl_core.weights.shapes import component_shapes, count_elements, weight_shapes
from tests.adapters import load_model
from tests.families import SIZE, Family

META = torch.device("meta")


def test_configs_state_the_shapes_of_every_file(family: Family):
    found = counter.shapes(family.folder)
    in_files = {name: component_shapes(family.folder, name) for name in found}
    assert found["transformer"] == in_files["transformer"]
    # Files name some tensors of text encoders otherwise.
    assert {name: count_elements(shapes) for name, shapes in found.items()} == {
        name: count_elements(shapes) for name, shapes in in_files.items()
    }
    assert {"transformer", "vae", "text_encoder"} <= found.keys()


def test_a_forward_pass_is_counted_as_on_encoded_prompts(family: Family):
    model = load_model(family.folder, (EMPTY_TRANSFORMER,), META)
    model.transformer.to(META)
    x_t = torch.zeros(1, *model.latent_shape(SIZE, family.frames), device=META)
    texts = Conditioning(family.conditioning.each(lambda tensor: tensor[:1].to(META)).own)
    tokens = texts["prompt_embeds"].shape[1]
    with torch.no_grad(), counter.FullTexts(tokens), FlopCounterMode(display=False) as counted:
        model.velocity(x_t, torch.zeros(1, device=META), texts)
    length = tokens - sizes.text_tokens(family.folder, 0)
    assert counter.forward_flops(family.folder, SIZE, family.frames, length) == counted.get_total_flops()


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
