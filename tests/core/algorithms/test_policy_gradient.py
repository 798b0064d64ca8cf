"""The loss of DDRL and FlowGRPO against its closed forms: ratios, the clip, distances, the diffusion loss."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from cosmos_rl_core.algorithms import grpo
from cosmos_rl_core.algorithms._base import Batch, Loss, Transitions
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.sampling.transition import Coefficients

CPU = torch.device("cpu")
MODES = ("mean_logp", "sum_logp", "unnormalised")


def policy(**options: Any) -> grpo.Algorithm:
    """FlowGRPO without its distance and its scale, so that only what a test sets is in the loss."""
    given = {"type": "grpo", "dataset": DatasetOptions(name="some prompts"), "kl_beta": 0.0, "loss_scale": 1.0}
    return grpo.Algorithm(grpo.Options.model_validate(given | options))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(device=CPU).manual_seed(seed), device=CPU, dtype=dtype)


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=CPU)


def steps_of(advantages: list[float], /, *shape: int, **given: Any) -> Transitions:
    """Recorded steps of states ``shape``, each with its own coefficients."""
    size, shape = len(advantages), shape or (2, 3, 3)
    spread = torch.linspace(0.5, 1.0, size, dtype=torch.float64, device=CPU)
    fields = {
        **{name: normal(seed, size, *shape) for seed, name in enumerate(("x", "x_next", "history"))},
        **{"t": spread, "input_scale": 1 - spread / 2, "keep": spread, "push": -0.3 * spread, "recall": 0.2 * spread},
        **{"std": 0.4 * spread, "diffusion": spread, "log_prob": 0 * spread},
        "advantages": torch.tensor(advantages, dtype=torch.float32, device=CPU),
    }
    return transitions_of(fields | given)


def transitions_of(fields: dict[str, Any]) -> Transitions:
    """Steps from their fields, among them the sampler's row."""
    at = Coefficients(**{name: fields[name] for name in Coefficients._fields})
    return Transitions(at=at, **{name: value for name, value in fields.items() if name not in Coefficients._fields})


def over(states: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """One number a sample, shaped to go with its state."""
    return numbers.view(-1, *(1,) * (states.ndim - 1))


def mean_of(batch: Transitions, velocity: torch.Tensor) -> torch.Tensor:
    keep, push, recall = (over(batch.x, c) for c in (batch.at.keep, batch.at.push, batch.at.recall))
    return keep * batch.x.double() + push * velocity.double() + recall * batch.history.double()


def density_of(batch: Transitions, velocity: torch.Tensor) -> torch.Tensor:
    """Log-density of every dimension by torch's own normal."""
    return Normal(mean_of(batch, velocity), over(batch.x, batch.at.std)).log_prob(batch.x_next.double())


def loss_of(
    algorithm: grpo.Algorithm, batch: Transitions, current: torch.Tensor, behaviour: Any, ref: Any = None
) -> Loss:
    return algorithm.loss(lambda part: {"current": current, "behaviour": behaviour, "reference": ref}[part], batch)


def gradient_of(algorithm: grpo.Algorithm, batch: Transitions, current: torch.Tensor, behaviour: torch.Tensor) -> Any:
    current = current.clone().requires_grad_()
    loss = loss_of(algorithm, batch, current, behaviour)
    return loss, torch.autograd.grad(loss.per_sample.sum(), current)[0]


# ---- where the weights are the rollout's


@pytest.mark.parametrize("mode", MODES)
def test_the_weights_of_the_rollout_have_a_ratio_of_exactly_1(mode: str):
    batch, velocity = steps_of([2.0, -3.0, 0.0]), normal(5, 3, 2, 3, 3)
    loss = loss_of(policy(ratio_mode=mode), batch, velocity.clone().requires_grad_(), velocity)
    assert loss.metrics["ratio"].tolist() == [1, 1, 1]
    assert loss.per_sample.tolist() == loss.metrics["policy_loss"].tolist() == [-2, 3, 0]
    for name in ("log_ratio", "log_ratio_per_dim", "approx_kl", "clipped"):
        assert loss.metrics[name].tolist() == [0, 0, 0]


def test_at_ratio_1_the_loss_is_the_scaled_negative_advantage_plus_the_data_term():
    algorithm, velocity = policy(data_beta=0.01, loss_scale=10.0), normal(5, 1, 2, 3, 3)
    media = Batch(normal(6, 1, 2, 3, 3), normal(7, 1, 2, 3, 3), torch.full((1,), 0.25, device=CPU), None)
    data = algorithm.loss(lambda _: velocity, media)
    total = loss_of(algorithm, steps_of([0.7]), velocity, velocity).per_sample + data.per_sample
    assert float(total) == pytest.approx(10 * (-0.7 + 0.01 * float(data.metrics["data_loss"])), rel=1e-6)


def test_the_unnormalised_gradient_is_of_minus_advantage_times_twice_error_times_mean():
    batch, velocity = steps_of([2.0, -1.0]), normal(5, 2, 2, 3, 3)
    probe = velocity.clone().requires_grad_()
    mean = mean_of(batch, probe)
    surrogate = -batch.advantages * (2 * (batch.x_next - mean.detach()) * mean).flatten(1).mean(1)
    (expected,) = torch.autograd.grad(surrogate.sum(), probe)
    _, gradient = gradient_of(policy(ratio_mode="unnormalised"), batch, velocity, velocity)
    assert torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("mode", "per_dim"), [("mean_logp", True), ("sum_logp", False)])
def test_the_gradient_of_the_log_density_of_an_sde_step_is_the_closed_form(mode: str, per_dim: bool):
    """(x' - mu) / (s_d^2 (-dt)) (1 + s_d^2 (1 - sigma) / 2 sigma) dt; over the 18 dimensions, or their sum."""
    sigma, dt, s_d = 0.8, -0.1, 0.7 * math.sqrt(0.8 / 0.2)
    push = (1 + s_d**2 * (1 - sigma) / (2 * sigma)) * dt
    given = {"keep": 1 + s_d**2 * dt / (2 * sigma), "push": push, "recall": 0.0, "std": s_d * math.sqrt(-dt)}
    batch = steps_of([-1.0], **{name: numbers(value) for name, value in given.items()})
    velocity = normal(5, 1, 2, 3, 3, dtype=torch.float64)
    _, gradient = gradient_of(policy(ratio_mode=mode), batch, velocity, velocity)
    expected = (batch.x_next - mean_of(batch, velocity)) / (s_d**2 * -dt) * push / (18 if per_dim else 1)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=0)


# ---- the ratio


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("logp_old", ["recompute", "stored"])
def test_ratios_match_torchs_normal(mode: str, logp_old: str):
    batch, old = steps_of([1.0, -1.0, 0.5]), normal(5, 3, 2, 3, 3)
    current = old + 0.05 * normal(6, 3, 2, 3, 3)
    batch = dataclasses.replace(batch, log_prob=density_of(batch, old).flatten(1).mean(1))
    true = (density_of(batch, current) - density_of(batch, old)).flatten(1)
    scale = {"mean_logp": 1.0, "sum_logp": 18.0, "unnormalised": 2 * batch.at.std.square()}[mode]
    metrics = loss_of(policy(ratio_mode=mode, logp_old=logp_old), batch, current, old).metrics
    assert torch.allclose(metrics["log_ratio"], true.sum(1), rtol=1e-11, atol=0)
    assert torch.allclose(metrics["log_ratio_per_dim"], true.mean(1), rtol=1e-11, atol=0)
    ratio = (true.mean(1) * scale).exp()
    assert torch.allclose(metrics["ratio"], ratio, rtol=1e-11, atol=0)
    assert torch.allclose(metrics["approx_kl"], ratio - 1 - ratio.log(), rtol=1e-6, atol=1e-12)
    assert metrics["logp_drift"].abs().max() < 1e-14
    assert {value.dtype for value in metrics.values()} == {torch.float64}


def test_a_change_in_the_last_bits_of_a_velocity_keeps_its_digits():
    """At float32 states of 200, where a difference of two squared errors in float32 is rounding and nothing else."""
    batch, old = (
        steps_of([1.0], x=200 * normal(0, 1, 2, 3, 3), x_next=200 * normal(1, 1, 2, 3, 3)),
        normal(5, 1, 2, 3, 3),
    )
    current = torch.nextafter(old, old + 1)
    change = batch.at.push * (current.double() - old.double())
    expected = (2 * (batch.x_next - mean_of(batch, old)) * change - change.square()).mean()
    log_ratio = loss_of(policy(ratio_mode="unnormalised"), batch, current, old).metrics["ratio"].log()
    assert float(log_ratio) == pytest.approx(float(expected), rel=1e-6)


def test_a_stored_density_that_differs_from_the_recomputed_one_is_drift():
    batch, velocity = steps_of([1.0]), normal(5, 1, 2, 3, 3)
    batch = dataclasses.replace(batch, log_prob=density_of(batch, velocity).flatten(1).mean(1) - 3e-5)
    kept, changed = (
        loss_of(policy(logp_old=old, clip_ratio=0.5), batch, velocity, velocity).metrics
        for old in ("recompute", "stored")
    )
    assert float(kept["logp_drift"]) == pytest.approx(3e-5, rel=1e-8) == float(changed["logp_drift"])
    assert (float(kept["ratio"]), float(changed["ratio"])) == (1, pytest.approx(math.exp(3e-5), rel=1e-12))


# ---- the clip


SCALAR = {"keep": 0.0, "push": 1.0, "recall": 0.0, "std": 1.0}


@pytest.mark.parametrize(
    ("advantage", "old", "new", "loss", "is_clipped"),
    [
        (1.0, 0.5, 0.6, -1.0001, True),
        (-1.0, 0.5, 0.6, math.exp(0.09), False),
        (1.0, 0.6, 0.5, -math.exp(-0.09), False),
        (-1.0, 0.6, 0.5, 0.9999, True),
        (0.0, 0.5, 0.6, 0.0, False),
    ],
)
def test_a_clipped_ratio_of_a_scalar_step_has_no_gradient(
    advantage: float, old: float, new: float, loss: float, is_clipped: bool
):
    """x' = 1 from .5 to .6: the log ratio is .25 - .16. Where the ratio is clipped there is no gradient at all."""
    fields = {name: numbers(value) for name, value in SCALAR.items()}
    batch = steps_of([advantage], 1, x_next=torch.ones(1, 1, device=CPU), **fields)
    algorithm = policy(ratio_mode="unnormalised", clip_ratio=1e-4)
    found, gradient = gradient_of(algorithm, batch, numbers(new).view(1, 1), numbers(old).view(1, 1))
    assert float(found.metrics["policy_loss"]) == pytest.approx(loss, rel=1e-9)
    assert float(found.metrics["ratio"]) == pytest.approx(math.exp(0.09 if new > old else -0.09), rel=1e-9)
    assert float(found.metrics["clipped"]) == is_clipped
    assert (float(gradient) == 0) == (is_clipped or advantage == 0)


@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_an_infinite_ratio_is_clipped_and_has_no_gradient(advantage: float):
    fields = {name: numbers(value) for name, value in (SCALAR | {"std": 1e-3}).items()}
    batch = steps_of([advantage], 1, x_next=torch.ones(1, 1, device=CPU), **fields)
    loss, gradient = gradient_of(policy(), batch, numbers(1.0).view(1, 1), numbers(0.0).view(1, 1))
    assert float(loss.metrics["ratio"]) == math.inf
    assert loss.per_sample.tolist() == pytest.approx([-1.0001 * advantage])
    assert float(gradient) == 0


# ---- the distance to the reference


@pytest.mark.parametrize("mode", ["exact", "flow_grpo", "unnormalised"])
def test_equal_current_and_reference_have_no_kl(mode: str):
    velocity = normal(5, 2, 2, 3, 3)
    loss = loss_of(policy(kl_beta=1.0, kl_mode=mode), steps_of([1.0, 2.0]), velocity, velocity, velocity.clone())
    assert loss.metrics["kl"].tolist() == [0, 0]


def test_the_distances_are_the_divergence_of_the_normals_up_to_their_known_factors():
    length = numbers(0.1, 0.02)
    batch = steps_of([1.0, -2.0])
    batch = dataclasses.replace(batch, at=batch.at._replace(diffusion=batch.at.std / length.sqrt()))
    current, old, ref = (normal(seed, 2, 2, 3, 3) for seed in (5, 6, 7))
    std = batch.at.std.view(-1, 1, 1, 1)
    exact = kl_divergence(Normal(mean_of(batch, current), std), Normal(mean_of(batch, ref), std)).flatten(1).mean(1)
    factors = {"exact": 1.0, "flow_grpo": length, "unnormalised": 2 * batch.at.std.square()}
    for mode, factor in factors.items():
        loss = loss_of(policy(kl_beta=0.3, kl_mode=mode, loss_scale=2.0), batch, current, old, ref)
        assert torch.allclose(loss.metrics["kl"], factor * exact, rtol=1e-10, atol=0)
        expected = 2 * (loss.metrics["policy_loss"] + 0.3 * factor * exact)
        assert torch.allclose(loss.per_sample.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("kl_beta", "asked"), [(0.0, ["behaviour", "current"]), (0.1, ["behaviour", "reference", "current"])]
)
def test_the_reference_is_evaluated_only_if_it_counts_and_only_current_gets_a_gradient(
    kl_beta: float, asked: list[str]
):
    algorithm, found = policy(kl_beta=kl_beta), []
    parts = {
        name: normal(i, 1, 2, 3, 3).requires_grad_() for i, name in enumerate(("current", "behaviour", "reference"))
    }
    loss = algorithm.loss(lambda part: found.append(part) or parts[part], steps_of([-1.0]))
    loss.per_sample.sum().backward()
    assert found == asked
    assert set(algorithm.needs.roles) == set(asked)
    assert [name for name, value in parts.items() if value.grad is not None] == ["current"]
    assert not any(value.requires_grad for value in loss.metrics.values())
    assert ("kl" in loss.metrics) == (kl_beta > 0)


# ---- each sample's own numbers, whatever the batch


def linear_gradient(advantages: list[float], mini_batch: int) -> torch.Tensor:
    """Total gradient at the weights of a linear velocity, over micro-batches of the same 6 steps."""
    weight = torch.eye(4, device=CPU).requires_grad_()
    whole = steps_of(advantages, 4)
    names = ("x", "x_next", "history", "log_prob", "advantages")
    fields = {**{name: getattr(whole, name) for name in names}, **whole.at._asdict()}
    for start in range(0, 6, mini_batch):
        part = transitions_of({name: value[start : start + mini_batch] for name, value in fields.items()})
        loss = loss_of(policy(kl_beta=0.1), part, part.x_t @ weight, part.x_t, 0.5 * part.x_t)
        loss.per_sample.sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_swapping_the_advantages_of_two_samples_changes_the_gradient():
    one, other, none = (linear_gradient([*a, 0, 0, 0, 0], 6) for a in ([3, -3], [-3, 3], [0, 0]))
    assert (one - none).abs().max() > 0.1
    assert torch.allclose(one - none, none - other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mini_batch", [1, 2, 3, 4])
def test_the_size_of_the_micro_batch_does_not_change_the_total_gradient(mini_batch: int):
    advantages = [3.0, -1.0, 0.5, -4.0, 2.0, 0.0]
    assert torch.allclose(linear_gradient(advantages, mini_batch), linear_gradient(advantages, 6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("logp_old", ["recompute", "stored"])
def test_given_dimensions_are_left_out_of_sums_and_of_their_number(mode: str, logp_old: str):
    """The last 2 of 3 frames alone have the loss of all 3 with the first masked out."""
    whole = steps_of([1.0, -2.0], 2, 3, 4)
    parts = [normal(seed, 2, 2, 3, 4) for seed in (5, 6, 7)]
    states = {name: getattr(whole, name)[:, :, 1:] for name in ("x", "x_next", "history")}
    masked = dataclasses.replace(whole, mask=torch.tensor([0.0, 1, 1], device=CPU).view(1, 1, 3, 1))
    algorithm = policy(kl_beta=0.2, ratio_mode=mode, logp_old=logp_old, clip_ratio=0.9)
    expected = loss_of(algorithm, dataclasses.replace(whole, **states), *(part[:, :, 1:] for part in parts))
    found = loss_of(algorithm, masked, *parts)
    assert found.per_sample.tolist() == pytest.approx(expected.per_sample.tolist(), rel=1e-6)
    for name, value in expected.metrics.items():
        assert found.metrics[name].tolist() == pytest.approx(value.tolist(), rel=1e-10)


def test_the_models_input_is_the_scaled_state_in_its_own_dtype():
    batch = steps_of([1.0, 2.0])
    assert batch.x_t.dtype == torch.float32
    assert torch.equal(batch.x_t[1], batch.at.input_scale[1].float() * batch.x[1])


def test_the_policy_loss_is_weighed_alone_and_its_metric_is_not():
    batch = steps_of([1.0, -2.0])
    current, old, ref = (normal(seed, 2, 2, 3, 3) for seed in (5, 6, 7))
    whole, half, none = (
        loss_of(policy(policy_weight=weight, kl_beta=0.3, loss_scale=1.0), batch, current, old, ref)
        for weight in (1.0, 0.5, 0.0)
    )
    assert torch.allclose(none.per_sample, 0.3 * none.metrics["kl"].float())
    assert torch.allclose(whole.per_sample - half.per_sample, 0.5 * whole.metrics["policy_loss"].float(), atol=1e-6)
    assert torch.equal(none.metrics["policy_loss"], whole.metrics["policy_loss"])


# ---- the data term


def media_of(sigmas: list[float], dtype: torch.dtype = torch.float64) -> Batch:
    t = numbers(*(sigma / (1 + sigma) for sigma in sigmas)).to(dtype)
    x_0, noise = (normal(seed, len(sigmas), 2, 3, 3, dtype=dtype) for seed in (0, 1))
    return Batch(x_0=x_0, noise=noise, t=t, advantages=None)


def test_a_perfect_velocity_has_no_data_loss():
    batch = media_of([0.3, 2.0])
    assert policy(data_beta=1.0).loss(lambda _: batch.noise - batch.x_0, batch).per_sample.tolist() == [0, 0]


def test_the_weight_of_the_velocity_at_sigma_2_is_5_ninths():
    batch = media_of([2.0])
    loss = policy(data_beta=0.3, loss_scale=10.0).loss(lambda _: batch.noise - batch.x_0 + 3, batch)
    assert float(loss.metrics["data_loss"]) == pytest.approx(9 * 5 / 9, rel=1e-12)
    assert float(loss.per_sample) == pytest.approx(10 * 0.3 * 5, rel=1e-6)


def test_the_data_loss_is_edms_on_the_estimate_of_x_0():
    """(1 + sigma^2) / sigma^2 at sigma = t / (1 - t); 1.25 at 2. It asks for the current velocity only."""
    sigmas, asked = [0.05, 2.0, 50.0], []
    batch, velocity = media_of(sigmas), normal(2, 3, 2, 3, 3, dtype=torch.float64)
    weights = [(1 + sigma**2) / sigma**2 for sigma in sigmas]
    assert weights[1] == 1.25
    estimate = batch.x_t - batch.t.view(-1, 1, 1, 1) * velocity
    expected = numbers(*weights) * (batch.x_0 - estimate).square().flatten(1).mean(1)
    loss = policy(data_beta=1.0).loss(lambda part: asked.append(part) or velocity, batch)
    assert torch.allclose(loss.metrics["data_loss"], expected, rtol=1e-10, atol=0)
    assert asked == ["current"]
