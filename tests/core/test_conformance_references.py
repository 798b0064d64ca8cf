"""Media from prompts with references, of every model plugin that takes them, against the stock pipeline."""

import math
from typing import Any

import pytest
import torch

from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import PICTURES, PROMPTS, SCHEDULERS, SIZE
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS, CONDITIONAL_MASK
from tests.references import ABLE, Referring, referring

META = torch.device("meta")
SIZES = (SIZE, (64, 32))


@pytest.fixture(scope="module", params=ABLE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Referring:
    """Each model plugin that takes references."""
    return referring(request.param, tmp_path_factory.mktemp("references"), device)


def cases() -> list[Any]:
    """Size, guidance and steps."""
    often = [(SIZES[0], 1.0, 5), (SIZES[1], 3.0, 16)]
    every = [(size, scale, steps) for size in SIZES for scale in (1.0, 3.0) for steps in (5, 16)]
    return [*often, *(pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in often)]


@pytest.mark.parametrize(("size", "guidance_scale", "num_steps"), cases())
def test_media_from_references_are_the_stock_pipelines(
    made: Referring,
    size: tuple[int, int],
    guidance_scale: float,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property,
):
    """With none, one and two of them, as the family takes, of texts of unequal length."""
    for stock in (made.stock, made.family.stock):
        monkeypatch.setattr(stock, "scheduler", SCHEDULERS["euler"]())
    found = {}
    for count in range(made.fewest, made.most + 1):
        for prompt in PROMPTS:
            pictures = PICTURES[len(PICTURES) - count :]
            expected = made.run_stock(prompt, pictures, size, guidance_scale, num_steps)
            found[prompt, count] = made.sample(prompt, pictures, size, guidance_scale, num_steps)
            drift = float((found[prompt, count] - expected).abs().max())
            record_property(f"drift of {count}", drift)
            assert drift < 1e-4
    ends = (found[PROMPTS[0], count] for count in (made.fewest, made.most))
    assert made.fewest == made.most or torch.dist(*ends) > 1e-2


@torch.no_grad()
def test_every_reference_counts_and_so_does_their_order(made: Referring):
    noise, t = made.noise(SIZE), torch.full((1,), 0.6, device=made.family.device)
    several = {
        "one": PICTURES[:1], "another": PICTURES[1:], "both": PICTURES, "the other way round": PICTURES[::-1]
    }  # fmt: skip
    velocities = {
        name: made.family.model.velocity(noise, t, stack([made.encoded("a", pictures)], made.family.device))
        for name, pictures in several.items()
        if len(pictures) <= made.most
    }
    assert len(velocities) == {1: 2, 2: 4}[made.most]
    for name, velocity in velocities.items():
        assert all((velocity - other).abs().max() > 1e-4 for others, other in velocities.items() if others != name)


def test_what_is_encoded_does_not_depend_on_what_was_before(made: Referring):
    """Same bits, unbatched on the CPU, without a gradient."""
    pictures = PICTURES[: made.most]
    first = made.encoded(PROMPTS[0], pictures)
    made.encoded(PROMPTS[1], pictures[::-1])
    again = made.encoded(PROMPTS[0], pictures)
    assert first.shapes == again.shapes
    assert first.own.keys() == again.own.keys()
    assert first.shared.keys() == again.shared.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in first.values())
    negative = made.negative(pictures)
    assert negative.own.keys() == first.own.keys()
    assert not negative.shared


def test_the_tokens_of_references_are_those_that_a_plan_counts(made: Referring):
    """Or none are added: the first latent frame is given, or the picture is told in another way."""
    pictures = PICTURES[: made.most]
    found = made.encoded("a", pictures)
    counted = sizes.reference_tokens(made.family.folder, [picture.shape[1:3] for picture in pictures])
    assert found.shapes == counted
    frames = made.family.frames
    planned = sizes.reference_shapes(made.family.folder, [one.shape[1:3] for one in pictures], SIZE, frames)
    assert planned == {name: tuple(tensor.shape) for name, tensor in found.shared.items()}
    if made.references.token_size is None:
        if not made.fewest:
            assert found.shared.keys() == {CONDITIONAL_LATENTS, CONDITIONAL_MASK}
            assert found[CONDITIONAL_MASK].flatten().tolist() == [1] + [0] * (len(found[CONDITIONAL_MASK][0]) - 1)
        return
    assert len(counted) == len(pictures)
    (tokens,) = found.shared.values()
    assert len(tokens) == sum(map(math.prod, counted))
    alone = [made.encoded("a", [picture]) for picture in pictures]
    assert torch.equal(tokens, torch.cat([next(iter(one.shared.values())) for one in alone]))


@torch.no_grad()
def test_a_batch_of_prompts_with_references_is_each_alone(made: Referring):
    noise = torch.cat([made.noise(SIZE), made.noise(SIZE).flip(1)])
    t = torch.tensor([0.3, 0.9], device=made.family.device)
    pictures = PICTURES[: made.most]
    both = stack([made.encoded(PROMPTS[0], pictures), made.encoded(PROMPTS[1], pictures)], made.family.device)
    together = made.family.model.velocity(noise, t, both)
    for i, prompt in enumerate(PROMPTS):
        own = stack([made.encoded(prompt, pictures)], made.family.device)
        alone = made.family.model.velocity(noise[i : i + 1], t[i : i + 1], own)
        assert (alone[0] - together[i]).abs().max() < 1e-5
    if CONDITIONAL_MASK in both:
        assert together[:, :, 0].count_nonzero() == 0
        moved = noise.clone()
        moved[:, :, 0] += 1
        assert torch.equal(made.family.model.velocity(moved, t, both), together)


def test_velocities_with_references_can_be_counted_without_weights(made: Referring):
    """On the meta device, as plans count them."""
    model = load_model(made.family.folder, (EMPTY_TRANSFORMER,), META)
    model.transformer.to(META)
    noise = made.noise(SIZE).to(META)
    conditioning = stack([made.encoded("a", PICTURES[: made.most])], made.family.device)
    with torch.no_grad():
        velocity = model.velocity(noise, torch.zeros(1, device=META), conditioning.each(lambda tensor: tensor.to(META)))
    assert velocity.shape == noise.shape


def test_prompts_of_other_references_are_not_put_in_one_batch(made: Referring):
    pictures = PICTURES[: made.most]
    with_them, without = made.encoded("a", pictures), made.family.model.encode_prompts(["a"], 200)[0]
    for batch in ([with_them, without], [without, with_them]):
        with pytest.raises(ValueError, match="do not fit in one batch"):
            stack(batch, made.family.device)
