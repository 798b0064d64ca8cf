"""Every model plugin's pipeline, counted by a plan without its weights."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import SIZE, Family, fewest, pictures
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.weights import counter
from cosmos_rl_core.weights.shapes import component_shapes, count_elements

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
    texts = family.conditioning.each(lambda tensor: tensor[:1].to(META))
    tokens = texts["prompt_embeds"].shape[1]
    with torch.no_grad(), counter.FullTexts(tokens), FlopCounterMode(display=False) as counted:
        model.velocity(x_t, torch.zeros(1, device=META), texts)
    length = tokens - sizes.text_tokens(family.folder, 0)
    shown = [one.shape[1:3] for one in pictures(fewest(family.folder))]
    assert counter.forward_flops(family.folder, SIZE, family.frames, length, shown) == counted.get_total_flops()
