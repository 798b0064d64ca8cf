"""Given frames count in no loss: it equals the loss of the generated frames by themselves."""

from typing import Any

import pytest
import torch

from cosmos_rl_core import plugins
from cosmos_rl_core.algorithms._base import Batch, Loss, Transitions
from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.sampling.transition import Coefficients

CPU = torch.device("cpu")
DATASET = DatasetOptions(name="some media")


def normal(seed: int) -> torch.Tensor:
    generator = torch.Generator(device=CPU).manual_seed(seed)
    return torch.randn(2, 3, 4, 2, 2, generator=generator, device=CPU, dtype=torch.float64)


X_0, NOISE, CURRENT, OTHER = (normal(seed) for seed in range(4))
ADVANTAGES = torch.tensor([1.0, -2.0], device=CPU)
MASK = torch.tensor([[0.0, 1, 1, 1], [0, 0, 1, 1]], device=CPU, dtype=torch.float64).view(2, 1, 4, 1, 1)
"""One given frame in the first video, two in the second."""


def loss_of(name: str, options: dict[str, Any], cut: Any, current: torch.Tensor, **fields: Any) -> Loss:
    plugin = plugins.load("algorithms", name)
    algorithm = plugin.Algorithm(plugin.Options.model_validate({"type": name, "dataset": DATASET, **options}))
    t, advantages = torch.tensor([0.3, 0.8], device=CPU, dtype=torch.float64)[cut[0]], ADVANTAGES[cut[0]]
    if algorithm.needs.transitions and algorithm.needs.data_term is None:
        at = Coefficients(t, t, t, -t, t, t, t)
        batch = Transitions(X_0[cut], NOISE[cut], X_0[cut], at, log_prob=-t, advantages=advantages, **fields)
    else:
        batch = Batch(X_0[cut], NOISE[cut], t, advantages, **fields)
    parts = {"current": current[cut], "behaviour": CURRENT[cut] + OTHER[cut] / 10, "reference": -OTHER[cut]}
    return algorithm.loss(lambda part: parts[part], batch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sft", {}),
        ("nft", {"kl_beta": 0.5}),
        ("ddrl", {"train_on": [0], "data_beta": 1.0, "kl_beta": 0.0}),
        # A clip that no ratio reaches, so that each has a gradient.
        ("grpo", {"train_on": [0], "kl_beta": 0.5, "clip_ratio": 0.99}),
    ],
)
def test_a_masked_loss_equals_the_loss_of_the_generated_frames_alone(name: str, options: dict[str, Any]):
    current = CURRENT.clone().requires_grad_()
    whole = (slice(0, 2),)
    masked = loss_of(name, options, whole, current, mask=MASK)
    for place, num_given in ((0, 1), (1, 2)):
        alone = loss_of(name, options, (slice(place, place + 1), slice(None), slice(num_given, None)), CURRENT)
        torch.testing.assert_close(masked.per_sample[place : place + 1], alone.per_sample)
        for metric, values in alone.metrics.items():
            torch.testing.assert_close(masked.metrics[metric][place : place + 1], values)
    (gradient,) = torch.autograd.grad(masked.per_sample.sum(), current)
    assert (gradient * (1 - MASK)).count_nonzero() == 0
    assert (gradient * MASK).count_nonzero() == 3 * 4 * (3 + 2)
    unmasked = loss_of(name, options, whole, CURRENT)
    assert (masked.per_sample - unmasked.per_sample).abs().min() > 1e-3
