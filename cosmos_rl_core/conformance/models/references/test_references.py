"""Media from prompts with references, of every model plugin that takes them, against the stock pipeline."""

import math
from typing import Any

import pytest
import torch

from cosmos_rl_core.conformance.models.adapters import load_model
from cosmos_rl_core.conformance.models.families import PROMPTS, SCHEDULERS, SIZE, pictures
from cosmos_rl_core.conformance.models.references.referring import ABLE, Referring, load_referring
from cosmos_rl_core.models._conditioning import stack
from cosmos_rl_core.models._loading import EMPTY_TRANSFORMER
from cosmos_rl_core.pipelines import sizes
from cosmos_rl_core.pipelines.spec import CONDITIONAL_LATENTS, CONDITIONAL_MASK

META = torch.device("meta")
SIZES = (SIZE, (64, 32))


@pytest.fixture(scope="module", params=ABLE)
def referring(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> Referring:
    """Return each model plugin that takes references."""
    return load_referring(request.param, tmp_path_factory.mktemp("references"), device)


def cases() -> list[Any]:
    """Return size, guidance and steps of each case."""
    often = [(SIZES[0], 1.0, 5), (SIZES[1], 3.0, 16)]
    every = [(size, scale, steps) for size in SIZES for scale in (1.0, 3.0) for steps in (5, 16)]
    return [*often, *(pytest.param(*case, marks=pytest.mark.slow) for case in every if case not in often)]


@pytest.mark.parametrize(("size", "guidance_scale", "num_steps"), cases())
def test_media_from_references_are_the_stock_pipelines(
    referring: Referring,
    size: tuple[int, int],
    guidance_scale: float,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
    record_property,
):
    """With none, one and two references, as far as the family takes them, and texts of unequal length."""
    for stock in (referring.stock, referring.family.stock):
        monkeypatch.setattr(stock, "scheduler", SCHEDULERS["euler"]())
    found = {}
    for count in range(referring.fewest, referring.most + 1):
        for prompt in PROMPTS:
            several = max(count, 2)
            shown = pictures(several)[several - count :]
            expected = referring.run_stock(prompt, shown, size, guidance_scale, num_steps)
            found[prompt, count] = referring.sample(prompt, shown, size, guidance_scale, num_steps)
            drift = float((found[prompt, count] - expected).abs().max())
            record_property(f"drift of {count}", drift)
            assert drift < 1e-4
    ends = (found[PROMPTS[0], count] for count in (referring.fewest, referring.most))
    assert referring.fewest == referring.most or torch.dist(*ends) > 1e-2


@torch.no_grad()
def test_every_reference_counts_and_so_does_their_order(referring: Referring):
    noise, device = referring.noise(SIZE), referring.family.device
    t = torch.full((1,), 0.6, device=device)
    every = pictures(max(2, referring.fewest))
    swapped = [*every[:-2], *every[:-3:-1]]
    several = {"one": every[:1], "another": every[1:2], "all": every, "the last two swapped": swapped}
    velocities = {
        name: referring.family.model.velocity(noise, t, stack([referring.encoded("a", shown)], device))
        for name, shown in several.items()
        if referring.fewest <= len(shown) <= referring.most
    }
    assert len(velocities) >= 2
    for name, velocity in velocities.items():
        assert all((velocity - other).abs().max() > 1e-4 for others, other in velocities.items() if others != name)


def test_what_is_encoded_does_not_depend_on_what_was_before(referring: Referring):
    """Same bits, unbatched on the CPU, without a gradient."""
    shown = pictures(referring.most)
    first = referring.encoded(PROMPTS[0], shown)
    referring.encoded(PROMPTS[1], shown[::-1])
    again = referring.encoded(PROMPTS[0], shown)
    assert first.shapes == again.shapes
    assert first.own.keys() == again.own.keys()
    assert first.shared.keys() == again.shared.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(tensor.requires_grad or tensor.device.type != "cpu" for tensor in first.values())
    negative = referring.negative(shown)
    assert negative.own.keys() == first.own.keys()
    assert not negative.shared


def test_the_tokens_of_references_are_those_that_a_plan_counts(referring: Referring):
    """Or no tokens are added: the first latent frame is given, or the picture reaches the model in another way."""
    shown = pictures(referring.most)
    found = referring.encoded("a", shown)
    counted = sizes.reference_tokens(referring.family.folder, [picture.shape[1:3] for picture in shown])
    assert found.shapes == counted
    frames = referring.family.frames
    planned = sizes.reference_shapes(referring.family.folder, [one.shape[1:3] for one in shown], SIZE, frames)
    assert planned == {name: tuple(tensor.shape) for name, tensor in found.shared.items()}
    if referring.references.token_size is None:
        if not referring.fewest:
            assert found.shared.keys() == {CONDITIONAL_LATENTS, CONDITIONAL_MASK}
            assert found[CONDITIONAL_MASK].flatten().tolist() == [1] + [0] * (len(found[CONDITIONAL_MASK][0]) - 1)
        return
    assert len(counted) == len(shown)
    (tokens,) = found.shared.values()
    assert len(tokens) == sum(map(math.prod, counted))
    if referring.fewest <= 1:
        alone = [referring.encoded("a", [picture]) for picture in shown]
        assert torch.equal(tokens, torch.cat([next(iter(one.shared.values())) for one in alone]))


@torch.no_grad()
def test_a_batch_of_prompts_with_references_is_each_alone(referring: Referring):
    noise = torch.cat([referring.noise(SIZE), referring.noise(SIZE).flip(1)])
    t = torch.tensor([0.3, 0.9], device=referring.family.device)
    shown = pictures(referring.most)
    both = stack([referring.encoded(PROMPTS[0], shown), referring.encoded(PROMPTS[1], shown)], referring.family.device)
    together = referring.family.model.velocity(noise, t, both)
    for i, prompt in enumerate(PROMPTS):
        own = stack([referring.encoded(prompt, shown)], referring.family.device)
        alone = referring.family.model.velocity(noise[i : i + 1], t[i : i + 1], own)
        assert (alone[0] - together[i]).abs().max() < 1e-5
    if CONDITIONAL_MASK in both:
        assert together[:, :, 0].count_nonzero() == 0
        moved = noise.clone()
        moved[:, :, 0] += 1
        assert torch.equal(referring.family.model.velocity(moved, t, both), together)


def test_velocities_with_references_can_be_counted_without_weights(referring: Referring):
    """On the meta device, as plans count them."""
    model = load_model(referring.family.folder, (EMPTY_TRANSFORMER,), META)
    model.transformer.to(META)
    noise = referring.noise(SIZE).to(META)
    conditioning = stack([referring.encoded("a", pictures(referring.most))], referring.family.device)
    with torch.no_grad():
        velocity = model.velocity(noise, torch.zeros(1, device=META), conditioning.each(lambda tensor: tensor.to(META)))
    assert velocity.shape == noise.shape


def test_prompts_of_other_references_are_not_put_in_one_batch(referring: Referring):
    shown = pictures(referring.most)
    with_them, without = referring.encoded("a", shown), referring.family.model.encode_prompts(["a"], 200)[0]
    for batch in ([with_them, without], [without, with_them]):
        with pytest.raises(ValueError, match="do not fit in one batch"):
            stack(batch, referring.family.device)
