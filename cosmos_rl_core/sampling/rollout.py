"""The loop from noise to samples."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.transition import Coefficients, clean, log_prob, mean, model_input, square_error


@dataclass(frozen=True)
class Trajectory:
    """The result of a rollout, and everything that a bit-exact replay of its recorded steps needs."""

    latents: Tensor
    """The final x_0: ``[B, ...]`` float32."""
    states: dict[int, Tensor]
    """States before and after each recorded step, ``[B, ...]`` float32: key i is the start of step i."""
    history: dict[int, Tensor]
    """The previous estimate of x_0, ``[B, ...]`` float32, by the recorded step that uses it."""
    log_prob: dict[int, Tensor]
    """Log-density of each recorded step's result, ``[B]`` float64, nats a dimension; none for a deterministic step."""


def table_of(kernel: Kernel, device: torch.device) -> Coefficients:
    """Return the coefficients of all steps as float64 tensors ``[num_steps]`` on ``device``."""
    columns = [[getattr(step, name) for step in kernel.steps] for name in Coefficients._fields]
    return Coefficients(*(torch.tensor(column, dtype=torch.float64, device=device) for column in columns))


def _no_draw(index: int) -> Tensor:
    raise ValueError(f"step {index} is stochastic and needs draw, its noise")


@torch.no_grad()
def sample(
    velocity: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    kernel: Kernel,
    *,
    draw: Callable[[int], Tensor] = _no_draw,
    record: Collection[int] = frozenset(),
    mask: Tensor | None = None,
    given: Tensor | None = None,
) -> Trajectory:
    """Take ``noise``, standard normal ``[B, ...]``, through the steps of the kernel to x_0, without gradient.

    ``velocity(x_t, t)`` gets the model's input and the noise level of each sample, ``[B]``, both float32.
    ``draw(i)`` returns the standard normal noise of step i, the shape and device of ``noise``; ``draw(-1)`` is for
    the start. ``record`` has the indices of the steps to keep. ``mask`` is 1 where a log-probability counts,
    see :func:`~cosmos_rl_core.sampling.transition.generated_mean`. Every state equals ``given``, the shape of
    ``noise``, where ``mask`` is 0.
    A step is float64, and its result is rounded to float32 before any use. The log-probability is for the rounded
    state given rounded states, and all of them can be stored.
    Raises ``ValueError`` for a stochastic kernel without ``draw``.
    """
    x = _held(_noised(noise.double() * kernel.start_std, kernel.start_churn_std, draw, -1), mask, given)
    estimates: list[Tensor] = []
    # Older estimates of x_0 than any step uses are dropped.
    depth = 1 + max(len(step.recall_older) for step in kernel.steps)
    table = table_of(kernel, x.device)
    states: dict[int, Tensor] = {}
    history: dict[int, Tensor] = {}
    log_probs: dict[int, Tensor] = {}
    for step in kernel.steps:
        at = table.at(torch.full((x.shape[0],), step.index, device=x.device))
        v = velocity(*model_input(x, at))
        center = mean(x, v, estimates[0] if step.recall else None, at)
        for weight, estimate in zip(step.recall_older, estimates[1:], strict=False):
            center = center + weight * estimate.double()
        x_next = _held(_noised(center, step.std, draw, step.index), mask, given)
        if step.index in record:
            states |= {step.index: x, step.index + 1: x_next}
            if step.recall:
                history[step.index] = estimates[0]
            if step.std > 0:
                log_probs[step.index] = log_prob(square_error(x_next, center, mask), at.std)
        estimates = [clean(x, v, at).float(), *estimates][:depth]
        x = x_next
    return Trajectory(x, states, history, log_probs)


def _noised(center: Tensor, std: float, draw: Callable[[int], Tensor], index: int) -> Tensor:
    return (center + std * draw(index).double() if std > 0 else center).float()


def _held(x: Tensor, mask: Tensor | None, given: Tensor | None) -> Tensor:
    return x if mask is None or given is None else x.where(mask != 0, given.float())
