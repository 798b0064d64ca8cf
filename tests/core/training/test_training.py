"""The optimizer step: schedules, state, clipping, sums over ranks and micro-batches, and the draws for training."""

from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn

from cosmos_rl_core.config.train import EmaConfig, OptimizerConfig, OptimizerName
from cosmos_rl_core.errors import ArtifactError, CosmosRLError
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.training.noise_levels import DrawKey, random_times, training_noise
from cosmos_rl_core.training.optimizer import (
    clip_gradients,
    load_optimizer_state,
    loss_share,
    make_optimizer,
    optimizer_state,
    optimizer_step,
    sum_gradients,
    summed_norms,
)
from cosmos_rl_core.training.schedules import ema_decay, lr_factor
from tests.other_device import DEVICE, OtherDevice

CPU = torch.device("cpu")
KEY = DrawKey(run_seed=1, iteration=2, epoch=0, sample_id="p3-4")


def adamw(named: dict[str, nn.Parameter], weight_decay: float = 0.01) -> torch.optim.Optimizer:
    return optimizer_of("AdamW", named, weight_decay)


def optimizer_of(name: OptimizerName, named: dict[str, nn.Parameter], weight_decay: float) -> torch.optim.Optimizer:
    return make_optimizer(named, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, name=name)


def schedule(**fields: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"optm_lr": 0.1, **fields})


def average(**fields: Any) -> EmaConfig:
    return EmaConfig.model_validate({"ema_enable": True, **fields})


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    """Deliberately not in the order of their names."""
    generator = torch.Generator(device=CPU).manual_seed(seed)
    shapes = {"up.weight": (3, 2), "bias": (3,), "down.weight": (2, 3)}
    return {name: nn.Parameter(torch.randn(*shape, generator=generator, device=CPU)) for name, shape in shapes.items()}


def set_gradients(named: dict[str, nn.Parameter], seed: int) -> None:
    for name, like in parameters(seed).items():
        named[name].grad = like.detach().clone()


def train(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(named, 100 + step)
        optimizer_step(optimizer, named, lr=0.1, max_norm=1.0, group=None)


# ---- clocks


def factors(count: int, **options: Any) -> list[float]:
    return [lr_factor(schedule(**options), step) for step in range(count)]


def test_the_warm_up_starts_at_0_and_is_done_after_its_steps():
    expected = [0, 1 / 3, 2 / 3, 1, 1, 1]
    assert factors(6, optm_warmup_steps=4, max_num_steps=10) == pytest.approx(expected)


@pytest.mark.parametrize(("warmup", "start", "expected"), [(0, 0, [1, 1]), (1, 0, [1, 1]), (3, 0.1, [0.1, 0.55, 1])])
def test_warm_ups_may_be_short_or_begin_above_0(warmup: int, start: float, expected: list[float]):
    assert factors(len(expected), optm_warmup_steps=warmup, optm_warmup_start_factor=start) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "tail"),
    [("linear", [0.75, 0.5, 0.25, 0]), ("sqrt", [0.5, 0.29289, 0.13397, 0]), ("cosine", [0.85355, 0.5, 0.14645, 0])],
)
def test_the_decay_covers_its_share_and_ends_at_the_last_step(kind: str, tail: list[float]):
    found = factors(14, optm_decay_type=kind, optm_decay_ratio=0.4, max_num_steps=10)
    assert found == pytest.approx([1] * 7 + tail + [0, 0, 0], abs=1e-5)


def test_a_decay_without_a_share_covers_all_after_the_warm_up_and_stops_at_the_floor():
    found = factors(9, optm_warmup_steps=2, optm_decay_type="linear", optm_min_lr_factor=0.2, max_num_steps=6)
    assert found == pytest.approx([0, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_the_average_follows_faster_at_first():
    found = [ema_decay(average(ema_decay=0.9), step) for step in (0, 1, 10, 1000)]
    assert found == pytest.approx([0.1, 2 / 11, 0.55, 0.9])


def test_the_average_moves_only_at_its_interval_and_not_at_all_when_disabled():
    every_third = average(ema_update_step_interval=3)
    assert [ema_decay(every_third, step) is not None for step in range(6)] == [False, False, True] * 2
    assert ema_decay(average(ema_enable=False), 0) is None


# ---- the optimizer and its state


def test_a_step_equals_the_step_of_adamw():
    named = parameters()
    before = {name: value.detach().clone() for name, value in named.items()}
    set_gradients(named, 1)
    gradients = {name: value.detach().clone() for name, value in parameters(1).items()}
    optimizer_step(adamw(named, 0.5), named, lr=0.1, max_norm=1e9, group=None)
    for name, value in named.items():
        # the first step of Adam is lr * sign(gradient), after the decoupled decay of 1 - lr * 0.5
        assert torch.allclose(value, before[name] * 0.95 - 0.1 * gradients[name].sign(), atol=1e-5)
        assert value.grad is None


def test_the_decay_of_adam_is_part_of_the_gradient():
    named = parameters()
    before = {name: value.detach().clone() for name, value in named.items()}
    for gradient in named.values():
        gradient.grad = torch.full_like(gradient, 0.1, device=CPU)
    optimizer_step(optimizer_of("Adam", named, 0.5), named, lr=0.1, max_norm=1e9, group=None)
    for name, value in named.items():
        assert torch.allclose(value, before[name] - 0.1 * (0.1 + 0.5 * before[name]).sign(), atol=1e-5)


def test_each_step_moves_at_the_learning_rate_that_it_is_given():
    named = parameters()
    before = {name: value.detach().clone() for name, value in named.items()}
    optimizer = adamw(named)
    set_gradients(named, 1)
    optimizer_step(optimizer, named, lr=0.0, max_norm=1.0, group=None)
    assert all(torch.equal(named[name], before[name]) for name in named)
    set_gradients(named, 1)
    found = optimizer_step(optimizer, named, lr=0.05, max_norm=1.0, group=None)
    norm = torch.cat([value.detach().reshape(-1) for value in parameters(1).values()]).norm()
    assert found == pytest.approx({"lr": 0.05, "grad_norm": float(norm)})
    assert not any(torch.equal(named[name], before[name]) for name in named)


def test_the_state_has_a_tensor_for_each_moment_of_each_parameter():
    named = parameters()
    optimizer = adamw(named)
    assert optimizer_state(optimizer, named) == {}
    train(named, optimizer, range(2))
    state = optimizer_state(optimizer, named)
    assert sorted(state) == sorted(f"{m}.{name}" for m in ("exp_avg", "exp_avg_sq", "step") for name in named)
    assert float(state["step.bias"]) == 2
    assert all(value.is_contiguous() and value.device == CPU for value in state.values())


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_going_on_from_stored_state_gives_the_same_bits_as_never_having_stopped(name: OptimizerName):
    straight, first = parameters(), parameters()
    train(straight, optimizer_of(name, straight, 0.01), range(6))

    optimizer = optimizer_of(name, first, 0.01)
    train(first, optimizer, range(3))
    state = optimizer_state(optimizer, first)
    resumed = {each: nn.Parameter(first[each].detach().clone()) for each in sorted(first)}
    fresh = optimizer_of(name, resumed, 0.01)
    load_optimizer_state(fresh, resumed, state)
    again = optimizer_state(fresh, resumed)
    assert all(torch.equal(again[each], state[each]) for each in state)
    train(resumed, fresh, range(3, 6))
    assert all(torch.equal(resumed[each], straight[each]) for each in straight)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_the_fused_implementation_goes_on_from_stored_state_with_the_same_bits(name: OptimizerName):
    def fused(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(named, name, fused=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    straight, first = parameters(), parameters()
    train(straight, fused(straight), range(4))
    optimizer = fused(first)
    train(first, optimizer, range(2))
    state = optimizer_state(optimizer, first)
    fresh = fused(first)
    load_optimizer_state(fresh, first, state)
    train(first, fresh, range(2, 4))
    assert all(torch.equal(first[each], straight[each]) for each in straight)


def test_loaded_state_does_not_move_with_the_optimizer():
    named = parameters()
    optimizer = adamw(named)
    train(named, optimizer, range(1))
    before = {name: value.clone() for name, value in optimizer_state(optimizer, named).items()}
    state = {name: value.clone() for name, value in before.items()}
    load_optimizer_state(optimizer, named, state)
    train(named, optimizer, range(1, 2))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_an_empty_state_is_a_fresh_optimizers():
    named = parameters()
    optimizer = adamw(named)
    train(named, optimizer, range(1))
    load_optimizer_state(optimizer, named, {})
    assert optimizer_state(optimizer, named) == {}


def test_state_of_other_parameters_is_refused():
    named = parameters()
    optimizer = adamw(named)
    train(named, optimizer, range(1))
    state = optimizer_state(optimizer, named)
    lacking = {name: value for name, value in state.items() if name != "exp_avg.bias"}
    with pytest.raises(ArtifactError, match=r"1 differ, e.g. exp_avg.bias is None"):
        load_optimizer_state(optimizer, named, lacking)
    with pytest.raises(ArtifactError, match=r"1 differ, e.g. exp_avg.other is \(.*, expected None"):
        load_optimizer_state(optimizer, named, state | {"exp_avg.other": state["exp_avg.bias"]})
    with pytest.raises(ArtifactError, match=r"exp_avg.bias is \('F32', \(2,\)\)"):
        load_optimizer_state(optimizer, named, state | {"exp_avg.bias": torch.zeros(2, device=CPU)})


# ---- gradients


def test_gradients_are_scaled_down_together_to_the_limit():
    named = parameters()
    set_gradients(named, 1)
    before = torch.cat([value.detach().reshape(-1) for value in parameters(1).values()])
    assert clip_gradients(named, 0.5, summed_norms(named, None).tolist()) == pytest.approx(float(before.norm()))
    after = torch.cat([cast(Tensor, value.grad).reshape(-1) for value in named.values()])
    assert float(after.norm()) == pytest.approx(0.5)
    assert torch.allclose(after / 0.5, before / before.norm())


def test_gradients_within_the_limit_are_left_alone():
    named = parameters()
    set_gradients(named, 1)
    clip_gradients(named, 1e3, summed_norms(named, None).tolist())
    assert all(torch.equal(cast(Tensor, named[name].grad), value) for name, value in parameters(1).items())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_the_step_and_moves_nothing(broken: float):
    named = parameters()
    before = {name: value.detach().clone() for name, value in named.items()}
    set_gradients(named, 1)
    cast(Tensor, named["down.weight"].grad)[0, 0] = broken
    with pytest.raises(CosmosRLError, match=r"1 of 3 trainable parameters .* the first is 'down.weight'"):
        optimizer_step(adamw(named), named, lr=0.1, max_norm=1.0, group=None)
    assert all(torch.equal(named[name], before[name]) for name in named)


def test_a_parameter_without_a_gradient_has_one_of_0_and_a_full_state():
    named = parameters()
    set_gradients(named, 1)
    named["bias"].grad = None
    optimizer = adamw(named)
    optimizer_step(optimizer, named, lr=0.1, max_norm=1.0, group=None)
    assert optimizer_state(optimizer, named)["exp_avg.bias"].tolist() == [0, 0, 0]


def test_weights_on_the_cpu_and_on_another_device_step_together():
    """Offloaded rows rest in the CPU's memory, their gradients too; all else is on the device."""

    def stepped(*there: str) -> dict[str, list[float]]:
        named, gradients = parameters(), parameters(1)
        for name in there:
            named[name] = nn.Parameter(named[name].detach().to(DEVICE))
            gradients[name] = nn.Parameter(gradients[name].detach().to(DEVICE))
        for name, parameter in named.items():
            parameter.grad = gradients[name].detach().clone()
        found = optimizer_step(adamw(named), named, lr=0.1, max_norm=0.5, group=None)
        assert [parameter.device == DEVICE for parameter in named.values()] == [name in there for name in named]
        return {name: parameter.detach().cpu().tolist() for name, parameter in named.items()} | {
            name: [number] for name, number in found.items()
        }

    expected = stepped()
    with OtherDevice():
        # The first by name is on either side, and so is the last.
        assert stepped("bias") == expected
        assert stepped("down.weight", "up.weight") == expected


class TwoRanks:
    """A group whose other rank holds known gradients, in the order in which they have to arrive."""

    rank = 0
    world_size = 2

    def __init__(self, other: dict[str, nn.Parameter]) -> None:
        self.other = torch.cat([cast(Tensor, other[name].grad).reshape(-1) for name in sorted(other)])

    def all_reduce_sum_(self, tensor: Tensor) -> Tensor:
        assert tensor.dtype == torch.float32
        return tensor.add_(self.other)


def test_gradients_are_summed_over_the_ranks_in_the_order_of_their_names():
    here, there = parameters(), parameters()
    set_gradients(here, 1)
    set_gradients(there, 2)
    sum_gradients(here, cast(Group, TwoRanks(there)))
    for name, value in here.items():
        assert torch.equal(cast(Tensor, value.grad), parameters(1)[name] + parameters(2)[name])


def total_gradient(mini_batch: int, samples: range, num_samples: int = 6) -> dict[str, nn.Parameter]:
    """Gradients of a mean over 6 samples at 2 noise levels each, or of one rank's share of it."""
    generator = torch.Generator(device=CPU).manual_seed(5)
    x = torch.randn(2, 6, 2, generator=generator, device=CPU)
    named = parameters()
    for level in range(2):
        for start in range(samples.start, samples.stop, mini_batch):
            part = x[level, start : min(start + mini_batch, samples.stop)]
            per_sample = (part @ named["up.weight"].T + named["bias"]).tanh().square().mean(1)
            per_sample = per_sample + (part @ named["down.weight"]).square().mean(1)
            loss_share(per_sample, num_samples, 2).backward()
    return named


@pytest.mark.parametrize("mini_batch", [1, 2, 4, 6])
def test_neither_micro_batches_nor_ranks_change_the_gradient(mini_batch: int):
    whole = total_gradient(6, range(6))
    cut = total_gradient(mini_batch, range(6))
    here, there = total_gradient(mini_batch, range(4)), total_gradient(mini_batch, range(4, 6))
    sum_gradients(here, cast(Group, TwoRanks(there)))
    for name, value in whole.items():
        assert torch.allclose(cast(Tensor, cut[name].grad), cast(Tensor, value.grad), rtol=1e-5, atol=1e-7)
        assert torch.allclose(cast(Tensor, here[name].grad), cast(Tensor, value.grad), rtol=1e-5, atol=1e-7)


def test_padding_of_weight_0_counts_for_nothing():
    per_sample = torch.tensor([2.0, 4.0], device=CPU)
    assert float(loss_share(per_sample, 2, 3)) == pytest.approx((2 + 4) / 6)
    assert float(loss_share(per_sample, 2, 3, 0.0)) == 0


# ---- draws


SIGMAS = (1.0, 0.9, 0.7, 0.4, 0.1, 0.0)


@pytest.mark.parametrize("num_times", [1, 3, 5])
def test_noise_levels_are_drawn_without_replacement_and_never_0(num_times: int):
    drawn = random_times(SIGMAS, num_times, KEY)
    assert len(set(drawn)) == num_times
    assert set(drawn) <= set(SIGMAS[:-1])


def test_every_noise_level_is_drawn_equally_often():
    """2000 samples at 2 of 5 levels: 800 each, deviation 22."""
    drawn = [t for i in range(2000) for t in random_times(SIGMAS, 2, DrawKey(0, 0, 0, f"s{i}"))]
    assert all(abs(drawn.count(sigma) - 800) < 90 for sigma in SIGMAS[:-1])


def test_the_draws_depend_on_each_part_of_the_key_and_on_nothing_else():
    others = [
        KEY._replace(run_seed=0),
        KEY._replace(iteration=3),
        KEY._replace(epoch=1),
        KEY._replace(sample_id="p3-5"),
    ]
    grid = tuple(1 - i / 40 for i in range(41))
    for draw in (lambda key: training_noise((2, 3), key, 0).tolist(), lambda key: random_times(grid, 40, key)):
        assert draw(KEY) == draw(KEY)
        assert draw(KEY) not in [draw(other) for other in others]


def test_the_noise_is_new_at_each_level_standard_normal_and_float32():
    noise = training_noise((100, 100), KEY, 0)
    assert (noise.dtype, noise.device, noise.shape) == (torch.float32, CPU, (100, 100))
    assert (float(noise.mean()), float(noise.std())) == pytest.approx((0, 1), abs=0.03)
    other = training_noise((100, 100), KEY, 1)
    assert abs(float((noise * other).mean())) < 0.04
