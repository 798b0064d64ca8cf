"""The optimizer step: AdamW or Adam over named parameters, with its state as named tensors.

Sums over parameters follow the order of their names. Except for rounding, the result does not depend on micro-batches,
ranks or retries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
"""State that Adam and AdamW keep for each parameter."""


def make_optimizer(parameters: Parameters, name: OptimizerName = "AdamW", **settings: Any) -> torch.optim.Optimizer:
    """Make an optimizer with equal settings for all parameters; :func:`optimizer_step` sets the learning rate.

    On a GPU it is the fused implementation, one kernel for all parameters; torch's default there runs one for each
    operation. With parameters in the CPU's memory torch chooses. The device is part of the recorded numerics.
    """
    named = [parameters[each] for each in sorted(parameters)]
    on_gpu = bool(named) and all(parameter.is_cuda for parameter in named)
    return getattr(torch.optim, name)(named, **({"lr": 0.0, "fused": on_gpu or None} | settings))


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Tensor]:
    """Return the tensors of the state: ``exp_avg.<name>``, ``exp_avg_sq.<name>`` and ``step.<name>``. Do not write
    to them.

    Empty before the first step.
    """
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in sorted(parameters.items())
        if parameter in optimizer.state
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
    # The fused implementation counts steps where the parameters are, so that nothing waits to read them.
    counts_there = optimizer.defaults["fused"]
    expected = {f"{m}.{name}": step if m == "step" else p for name, p in parameters.items() for m in _MOMENTS}
    check_tensors(state, expected, "the optimizer state of these trainable parameters")
    for name, parameter in sorted(parameters.items()):
        optimizer.state[parameter] = {
            moment: state[f"{moment}.{name}"].to(
                "cpu" if moment == "step" and not counts_there else parameter.device, copy=True
            )
            for moment in _MOMENTS
        }


def state_shards(shards: Shards) -> Shards:
    """Return the sharding of the optimizer's state: moments are sharded like parameters, step counts are not."""
    shapes = {f"{moment}.{name}": shape for name, shape in shards.shapes.items() for moment in _MOMENTS[1:]}
    return Shards(shards.mesh, shapes)


def loss_share(per_sample: Tensor, num_samples: int, num_times: int, weight: float = 1.0) -> Tensor:
    """Return a micro-batch's share of the loss of its optimizer step, a scalar to call ``backward`` on.

    ``per_sample`` ``[B]`` has one noise level for each entry. ``num_samples`` counts the samples of the optimizer step
    on all ranks, ``num_times`` the noise levels of each. The sum of all gradients over micro-batches and ranks is the
    gradient of the mean loss. ``weight`` is 0 for padding, which ``num_samples`` does not count.
    """
    return (per_sample * weight).sum() / (num_samples * num_times)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    *,
    lr: float,
    max_norm: float,
    group: Group | None,
    shards: Shards = WHOLE,
) -> dict[str, float]:
    """Sum the gradients over ranks, clip them, move the weights and clear the gradients.

    Gradients of sharded tensors are sums over ranks already. Returns the gradient norm before clipping and the learning
    rate. Raises like :func:`clip_gradients`, on all ranks.
    """
    norms = summed_norms(parameters, group, shards).tolist()
    return move(optimizer, parameters, norms, lr=lr, max_norm=max_norm)


def summed_norms(parameters: Parameters, group: Group | None, shards: Shards = WHOLE) -> Tensor:
    """Sum the gradients over ranks. Return their 2-norms in the order of the names: float64, on the device. Collective.

    The norms cover all rows of sharded tensors on all ranks. Nothing waits for the device.
    """
    sum_gradients({name: p for name, p in parameters.items() if not shards.cuts(name)}, group)
    names = sorted(parameters)
    here = [torch.linalg.vector_norm(_gradient(parameters[name]), dtype=torch.float64) for name in names]
    return shards.norms(names, _stacked(here))


def move(
    optimizer: torch.optim.Optimizer, parameters: Parameters, norms: Sequence[float], *, lr: float, max_norm: float
) -> dict[str, float]:
    """Clip the gradients by their ``norms`` from :func:`summed_norms`, move the weights and clear the gradients.

    Returns and raises like :func:`optimizer_step`.
    """
    norm = clip_gradients(parameters, max_norm, norms)
    for settings in optimizer.param_groups:
        settings["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"grad_norm": norm, "lr": lr}


def sum_gradients(parameters: Parameters, group: Group | None) -> None:
    """Sum every gradient over the ranks in one float32 buffer; a missing gradient counts as 0."""
    gradients = [_gradient(parameters[name]) for name in sorted(parameters)]
    if group is None or group.world_size == 1:
        return
    flat = torch.cat([gradient.reshape(-1).float() for gradient in gradients])
    group.all_reduce_sum_(flat)
    totals = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total.view(gradient.shape))


def clip_gradients(parameters: Parameters, max_norm: float, norms: Sequence[float]) -> float:
    """Scale all gradients to the global 2-norm ``max_norm`` if they exceed it. Return the norm before scaling.

    ``norms`` has the norm of each gradient in the order of the names.
    Raises :class:`DivergenceError` if the norm is not finite, so that no step is skipped silently.
    """
    names = sorted(parameters)
    norm = math.hypot(*norms)
    if not math.isfinite(norm):
        broken = [name for name, value in zip(names, norms, strict=True) if not math.isfinite(value)]
        raise DivergenceError(
            f"the gradient norm is {norm}: {len(broken)} of {len(names)} trainable parameters have gradients that are "
            f"not finite, the first is {broken[0]!r}; look at the losses and lower the learning rate"
        )
    if norm > max_norm:
        for name in names:
            _gradient(parameters[name]).mul_(max_norm / norm)
    return norm


def _stacked(numbers: Sequence[Tensor]) -> Tensor:
    """Stack scalars to ``[len(numbers)]`` on the GPU if any is there; norms of offloaded rows are on the CPU."""
    device = next((number.device for number in numbers if number.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([number.to(device) for number in numbers])


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, device=parameter.device)
    return parameter.grad
