"""Averages of weights over a share of the training: decays against the power function that they are samples of."""

from typing import Any, cast

import pytest

from cosmos_rl_core.config.train import EmaConfig
from cosmos_rl_core.training.schedules import ema_decay, power_of_rate


def average(**fields: Any) -> EmaConfig:
    return EmaConfig.model_validate({"ema_enable": True, **fields})


@pytest.mark.parametrize(("rate", "power"), [(0.1, 6.937204), ((3 / 7) ** 0.5 / 2.5, 0.5), (0.5**0.5 / 3, 1)])
def test_the_power_of_a_rate_has_that_deviation(rate: float, power: float):
    """0.1 is cosmos-rl's; of gamma 1/2 and 1 the deviations are exact."""
    assert power_of_rate(rate) == pytest.approx(power, abs=1e-6)


def test_a_power_average_weighs_steps_by_a_power_of_time_however_long_the_run():
    """Its mean and deviation, relative to the steps done, are (g + 1) / (g + 2) and the rate."""
    config = average(ema_rate=0.1)
    decays = [ema_decay(config, step) for step in range(1000)]
    assert [decays[k] for k in (0, 10, 100)] == pytest.approx([0, 0.46931, 0.92406], abs=1e-5)
    g = 6.937204
    for steps in (300, 1000):
        weights, kept = [0.0] * steps, 1.0
        for step in reversed(range(steps)):
            decay = cast(float, decays[step])
            weights[step], kept = kept * (1 - decay), kept * decay
        times = [(step + 0.5) / steps for step in range(steps)]
        mean = sum(w * t for w, t in zip(weights, times, strict=True))
        variance = sum(w * (t - mean) ** 2 for w, t in zip(weights, times, strict=True))
        assert (sum(weights), mean, variance**0.5) == pytest.approx((1, (g + 1) / (g + 2), 0.1), rel=1e-3)


def test_near_its_largest_rate_a_power_average_is_the_plain_mean():
    found = [ema_decay(average(ema_rate=0.28859), step) for step in (1, 9, 99)]
    assert found == pytest.approx([1 / 2, 9 / 10, 99 / 100], rel=2e-3)


def test_a_power_average_that_moves_rarely_agrees_with_a_frequent_one_on_still_weights():
    every_fourth = average(ema_rate=0.1, ema_update_step_interval=4)
    one, four = 1.0, 1.0
    for step in range(4, 24):
        one *= cast(float, ema_decay(average(ema_rate=0.1), step))
        four *= decay if (decay := ema_decay(every_fourth, step)) is not None else 1.0
    assert four == pytest.approx(one)
    assert ema_decay(every_fourth, 3) == 0
