"""Wan 2.1 I2V, in addition to the tests of every model with references."""

import numpy as np
import pytest
import torch

from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import CPU, PICTURES, SIZE, fed_to
from cosmos_rl_core.conformance.models.references.referring import Referring, load_referring
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.models._conditioning import Conditioning, stack
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.models.wan_i2v.model import CONDITION, PICTURE_EMBEDS
from cosmos_rl_core.pipelines import sizes

META = torch.device("meta")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Referring:
    return load_referring("wan_i2v", tmp_path_factory.mktemp("i2v"))


def test_the_transformer_gets_the_inputs_of_the_stock_pipeline(made: Referring):
    """What CLIP sees bit for bit; the latents of picture and grey frames, after a mask of 4 channels."""
    with fed_to(made.stock.transformer) as fed:
        made.run_stock("a", PICTURES[:1], SIZE, 3.0, 1)
    own = made.encoded("a", PICTURES[:1])
    assert own[PICTURE_EMBEDS].shape == (257, 16)
    assert len(fed) == 2
    for call in fed:
        assert torch.equal(call["encoder_hidden_states_image"][0], own[PICTURE_EMBEDS])
        assert torch.allclose(call["state"][0, 16:], own[CONDITION], rtol=0, atol=1e-5)
    mask = own[CONDITION][:4]
    assert mask[:, 0].eq(1).all()
    assert mask[:, 1:].count_nonzero() == 0
    assert own[CONDITION][4:, 1:].std() > 1e-3


def test_every_frame_is_generated(made: Referring):
    conditioning = stack([made.encoded("a", PICTURES[:1])], CPU)
    with torch.no_grad():
        velocity = made.family.model.velocity(made.noise(SIZE), torch.full((1,), 0.5), conditioning)
    assert velocity[:, :, 0].std() > 1e-2


@pytest.mark.parametrize("length", [511, 513])
def test_texts_of_another_length_are_refused(made: Referring, length: int):
    """The transformer counts 512 from the end, and would take a part of the text for the picture."""
    sizes.check_prompt_length(made.family.folder, 512)
    with pytest.raises(ConfigError, match=f"max_prompt_length is 512 for this model, found {length}"):
        sizes.check_prompt_length(made.family.folder, length)


def test_a_plan_counts_with_the_shapes_of_a_picture(made: Referring):
    model = load_model(made.family.folder, (EMPTY_TRANSFORMER,), META)
    model.transformer.to(META)
    real = stack([made.encoded("a", PICTURES[:1])], CPU).each(lambda tensor: tensor.to(META))
    shapes = sizes.reference_shapes(made.family.folder, [PICTURES[0].shape[1:3]], SIZE, made.family.frames)
    planned = {name: torch.zeros(1, *shape, device=META) for name, shape in shapes.items()}
    x_t, fed_shapes = made.noise(SIZE).to(META), []
    for conditioning in (real, Conditioning(real.own, planned)):
        with torch.no_grad(), fed_to(model.transformer) as fed:
            model.velocity(x_t, torch.zeros(1, device=META), conditioning)
        fed_shapes.append({name: value.shape for name, value in fed[0].items() if isinstance(value, torch.Tensor)})
    assert fed_shapes[0] == fed_shapes[1]


def test_the_picture_is_stretched_to_the_video_but_clip_reads_it_as_it_is(made: Referring):
    picture = PICTURES[0]
    small = np.ascontiguousarray(picture[:, ::2, ::2])
    own, other = made.encoded("a", [picture]), made.encoded("a", [small])
    assert own[CONDITION].shape == other[CONDITION].shape
    assert not torch.equal(own[PICTURE_EMBEDS], other[PICTURE_EMBEDS])
