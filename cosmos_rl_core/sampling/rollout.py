"""The one loop that turns noise into samples."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_rl_core.sampling.kernel import Kernel
from cosmos_rl_core.sampling.transition import Coefficients, clean, log_prob, mean, model_input, square_error


@dataclass(frozen=True)
class Trajectory:
    """Where a rollout ended, and what it takes to replay its recorded steps bit for bit."""

    latents: Tensor
    """The final x_0: ``[B, ...]`` float32."""
    states: dict[int, Tensor]
    """Before and after each recorded step, ``[B, ...]`` float32: key i is the state that step i starts from."""
    history: dict[int, Tensor]
    """The previous estimate of x_0, ``[B, ...]`` float32, by the recorded step that recalls it."""
    log_prob: dict[int, Tensor]
    """``[B]`` float64, nats a dimension, by the recorded step; none for a deterministic one."""


def table_of(kernel: Kernel, device: torch.device) -> Coefficients:
    """All steps as float64 tensors ``[num_steps]`` on ``device``."""
    columns = [[getattr(step, name) for step in kernel.steps] for name in Coefficients._fields]
    numbers = [[math.nan if value is None else value for value in column] for column in columns]
    return Coefficients(*(torch.tensor(column, dtype=torch.float64, device=device) for column in numbers))


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

    ``velocity(x_t, t)`` gets what the model is fed and the noise level of each sample, ``[B]``, both float32.
    ``draw(i)`` is the standard normal noise of step i, the shape and device of ``noise``; ``draw(-1)`` that of the
    start. ``record`` has the indices of the steps to keep. ``mask`` is 1 where a log-probability counts, see
    :func:`~cosmos_rl_core.sampling.transition.generated_mean`. ``given``, the shape of ``noise``, is what every state
    has where ``mask`` is 0, from the first to the last.
    A step is float64 and its result rounded to float32 before anything sees it: the log-probability is that of the
    rounded state, given rounded ones, hence of what can be stored.
    Raises ``ValueError`` for a stochastic kernel without ``draw``, for a recorded step that the kernel lacks, and for
    ``given`` without ``mask``.
    """
    if unknown := set(record) - set(range(len(kernel.steps))):
        raise ValueError(f"steps {sorted(unknown)} cannot be recorded: there are {len(kernel.steps)}, from 0")
    if given is not None and mask is None:
        raise ValueError("given latents need the mask that says where they are given")
    x = _held(_noised(noise.double() * kernel.start_std, kernel.start_churn_std, draw, -1), mask, given)
    estimates: list[Tensor] = []
    """Of x_0, the latest first, as many as a step looks back at."""
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
