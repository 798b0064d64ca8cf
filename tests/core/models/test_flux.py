"""What FLUX.1 has that other models do not: a schnell without embedded guidance, and a guidance that is an input."""

from pathlib import Path

import pytest
import torch

from cosmos_rl_core.conformance.models import tiny_pipelines
from cosmos_rl_core.conformance.models.families import Family, kernel, load_family, run_stock
from cosmos_rl_core.models._conditioning import Conditioning, stack
from cosmos_rl_core.models._packing import pack, unpack
from cosmos_rl_core.sampling.rollout import sample


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tiny_pipelines.save("flux", tmp_path_factory.mktemp("schnell"), guidance_embeds=False)
    return load_family("flux", str(folder))


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_samples_of_schnell_equal_the_stock_pipelines(schnell: Family, guidance_scale: float):
    """On its own scheduler, which does not shift, and its 4 steps."""
    expected = run_stock(schnell.stock, schnell.noise, num_inference_steps=4, guidance_scale=guidance_scale)
    ours = sample(schnell.velocity(guidance_scale), schnell.noise, kernel(schnell, "euler", 4)).latents
    assert (ours - expected).abs().max() < 1e-4


def test_the_levels_equal_the_levels_of_the_stock_pipeline(schnell: Family):
    """The scheduler's own would end at 0.001 before 0."""
    assert schnell.model.schedule(4, (32, 64), 1).sigmas == (1.0, 0.75, 0.5, 0.25, 0.0)


def test_another_embedded_guidance_is_another_velocity(tmp_path: Path):
    family = load_family("flux", str(tiny_pipelines.save("flux", tmp_path)))
    t = torch.tensor([0.3, 0.9])
    with torch.no_grad():
        before = family.velocity()(family.noise, t)
        family.model.embedded_guidance_scale = 7.0
        assert (family.velocity()(family.noise, t) - before).abs().max() > 1e-3


def test_packing_is_undone_and_keeps_squares_together():
    latents = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6).float()
    tokens = pack(latents)
    assert tokens.shape == (2, 6, 12)
    # The second token of the first row: columns 2 and 3 of rows 0 and 1, channel after channel.
    assert tokens[0, 1].tolist() == latents[0, :, :2, 2:4].flatten().tolist()
    assert torch.equal(unpack(tokens, 4, 6), latents)


def test_texts_of_unequal_length_are_padded_and_masked():
    short, long = (Conditioning({"prompt_embeds": torch.ones(n, 3)}) for n in (2, 4))
    batch = stack([short, long], torch.device("cpu"))
    assert batch["prompt_embeds"].sum(-1).tolist() == [[3, 3, 0, 0], [3, 3, 3, 3]]
    assert batch["prompt_embeds_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert stack([short, short], torch.device("cpu")).keys() == {"prompt_embeds"}
