"""The optimizer step: AdamW or Adam over named parameters, its state as named tensors, gradients whatever the batching.

Every sum over parameters is taken in the order of their names, and every draw is a function of what it is for: neither
micro-batches nor ranks nor retries can be told from the result, rounding aside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cosmos_rl_core.errors import DivergenceError
from cosmos_rl_core.parallel.sharding import WHOLE, Shards
from cosmos_rl_core.storage.tensor_files import check_tensors

if TYPE_CHECKING:
    from cosmos_rl_core.config.train import OptimizerName
    from cosmos_rl_core.parallel.distributed import Group

Parameters = Mapping[str, nn.Parameter]
"""The trainable parameters by name."""

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW remembers of each parameter, and Adam too."""

_OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def make_optimizer(
    parameters: Parameters,
    *,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    name: OptimizerName = "AdamW",
) -> torch.optim.Optimizer:
    """An optimizer of all parameters alike; :func:`optimizer_step` sets the learning rate of each step.

    torch chooses between its implementations by the device alone, and both are part of the recorded numerics.
    """
    named = [parameters[each] for each in sorted(parameters)]
    return _OPTIMIZERS[name](named, lr=0.0, betas=betas, eps=epsilon, weight_decay=weight_decay)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Tensor]:
    """Copies on the CPU: ``exp_avg.<name>``, ``exp_avg_sq.<name>``, ``step.<name>``; empty before the first step."""
    return {
        f"{moment}.{name}": optimizer.state[parameters[name]][moment].detach().to("cpu", copy=True).contiguous()
        for name in sorted(parameters)
        if parameters[name] in optimizer.state
        for moment in _MOMENTS
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters, state: Mapping[str, Tensor]) -> None:
    """Restore the bits that :func:`optimizer_state` returned; an empty state resets the optimizer.

    Raises :class:`ArtifactError` if names, shapes or types do not fit the parameters.
    """
    optimizer.state.clear()
    if not state:
        return
    step = torch.zeros((), device="cpu")
    expected = {f"{m}.{name}": step if m == "step" else p for name, p in parameters.items() for m in _MOMENTS}
    check_tensors(state, expected, "the optimizer state of these trainable parameters")
    for name, parameter in sorted(parameters.items()):
        optimizer.state[parameter] = {
            moment: state[f"{moment}.{name}"].to("cpu" if moment == "step" else parameter.device, copy=True)
            for moment in _MOMENTS
        }


def state_shards(shards: Shards) -> Shards:
    """How the tensors of :func:`optimizer_state` are cut: as their parameters are; counts of steps are not."""
    moments = [moment for moment in _MOMENTS if moment != "step"]
    shapes = {f"{moment}.{name}": shape for name, shape in shards.shapes.items() for moment in moments}
    return Shards(shards.mesh, shapes)


def loss_share(per_sample: Tensor, num_samples: int, num_times: int, weights: Tensor | None = None) -> Tensor:
    """What a micro-batch adds to the loss of its optimizer step: call ``backward`` on this scalar.

    ``per_sample`` is ``[B]`` at one noise level each; ``num_samples`` counts the optimizer step's samples on all ranks
    and ``num_times`` the noise levels of each: gradients summed over micro-batches and ranks are those of the mean.
    ``weights`` ``[B]`` are 0 for padding, which ``num_samples`` does not count.
    Raises ``ValueError`` unless there is one loss, and one weight, a sample.
    """
    if per_sample.ndim != 1 or (weights is not None and weights.shape != per_sample.shape):
        found = list(per_sample.shape), None if weights is None else list(weights.shape)
        raise ValueError(f"needs one loss and one weight a sample; found shapes {found[0]} and {found[1]}")
    weighted = per_sample if weights is None else per_sample * weights
    return weighted.sum() / (num_samples * num_times)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    *,
    lr: float,
    max_norm: float,
    group: Group | None,
    shards: Shards = WHOLE,
) -> dict[str, float]:
    """Sum the gradients over ranks, clip, move the weights, clear the gradients.

    Gradients of cut tensors are sums over ranks already.
    Returns the gradient norm before clipping, and the learning rate. Raises as :func:`clip_gradients` on all ranks.
    """
    sum_gradients({name: p for name, p in parameters.items() if not shards.cuts(name)}, group)
    norm = clip_gradients(parameters, max_norm, shards)
    for settings in optimizer.param_groups:
        settings["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": norm, "lr": lr}


def sum_gradients(parameters: Parameters, group: Group | None) -> None:
    """Sum every gradient over the ranks, in float32, in one buffer; a parameter that got none has a gradient of 0."""
    gradients = [_gradient(parameters[name]) for name in sorted(parameters)]
    if group is None or group.world_size == 1:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    group.all_reduce_sum_(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view(gradient.shape))


def clip_gradients(parameters: Parameters, max_norm: float, shards: Shards = WHOLE) -> float:
    """Scale all gradients down together to the global 2-norm ``max_norm`` if they exceed it; the norm before that.

    The norm of a tensor that is cut is that of all its rows, on all ranks.

    Raises :class:`DivergenceError` if the norm is not finite: nobody would know of a step left out in silence.
    """
    names = sorted(parameters)
    gradients = [_gradient(parameters[name]) for name in names]
    here = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    norms = shards.norms(names, _stacked(here)).tolist()
    norm = math.hypot(*norms)
    if not math.isfinite(norm):
        broken = [name for name, value in zip(names, norms, strict=True) if not math.isfinite(value)]
        raise DivergenceError(
            f"the gradient norm is {norm}: {len(broken)} of {len(names)} trainable parameters have gradients that are "
            f"not finite, the first is {broken[0]!r}; look at the losses and lower the learning rate"
        )
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    """``[len(numbers)]``, on the device that computes: norms of gradients of offloaded rows are on the CPU."""
    device = next((number.device for number in numbers if number.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([number.to(device) for number in numbers])


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, device=parameter.device)
    return parameter.grad
