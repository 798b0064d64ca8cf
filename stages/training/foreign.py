"""Rollouts of another run, and how far the trained policy is from the policies that made them."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from cosmos_rl_core import seeds
from cosmos_rl_core.algorithms._base import Batch
from cosmos_rl_core.algorithms._foreign import Foreign
from cosmos_rl_core.config.policy import LoraConfig
from cosmos_rl_core.errors import OffPolicyError
from cosmos_rl_core.weights.parts import BEHAVIOUR, CURRENT
from stages import contracts
from stages.artifacts.request import Request
from stages.training.draws import LatentDraws
from stages.training.micro_batches import my_share
from stages.training.order import Unit
from stages.training.trainer import Trainer

UNITS = 64
"""Most units (samples or pairs) that a drift is measured on."""
_EPOCH = -1
"""Number of the pass for the draws of a drift. No pass of training has this number."""


def other_adapter(request: Request) -> LoraConfig | None:
    """Return the settings of the adapter that made the rollouts, if the trained one has another shape; else None."""
    config = request.settings(contracts.Update)
    if config.foreign is None or config.lora is None or config.foreign.lora == config.lora:
        return None
    return config.foreign.lora


def drift(
    trainer: Trainer, draws: LatentDraws, units: Sequence[Unit], behaviours: Sequence[str], mini_batch: int
) -> float:
    """Return how far the trained policy is from the policies that made the rollouts. Collective.

    It is the mean of ``(v_p - v_b)²`` over the mean of ``(v_b - (noise - x_0))²``, unitless. Both means are over
    generated dimensions and over at most :data:`UNITS` randomly chosen units, each at one noise level that its key
    decides. ``v_p`` is the velocity of ``current``, ``v_b`` the velocity of the weights ``behaviours`` that made a
    sample's rollout.
    """
    run_seed, iteration = draws.key
    order = seeds.permutation(len(units), "drift", run_seed, iteration)
    chosen = [units[i] for i in sorted(order[:UNITS])]
    by_rollout = replace(draws, stored=replace(draws.stored, behaviours=[*behaviours]))
    at_once = max(1, mini_batch // draws.members)
    group, sums = trainer.group, [0.0, 0.0]
    batches = [
        [key for unit in part for key in unit]
        for rollout in _by_rollout(chosen)
        for part in (rollout[i : i + at_once] for i in range(0, len(rollout), at_once))
    ]
    makes = [[lambda weight, keys=keys: by_rollout(keys, _EPOCH, [0], weight)] for keys in batches]
    for index, make in enumerate(my_share(makes, group)):
        trainer.context.progress("measuring drift", index, len(makes))
        micro = make().to(group.device)
        assert isinstance(micro.batch, Batch)
        batch, velocity = micro.batch, trainer.velocities(replace(micro, keys=()))
        with torch.no_grad():
            made_by, own = velocity(BEHAVIOUR), velocity(CURRENT)
            errors = (own - made_by), (made_by - (batch.noise - batch.x_0))
            for place, error in enumerate(errors):
                sums[place] += micro.weight * float(batch.mean(error.square()).double().sum())
    every = group.gather(sums if group.leads else [0.0, 0.0])
    moved, missed = (sum(one[place] for one in every) for place in (0, 1))
    return moved / missed


def check(found: float, foreign: Foreign, iteration: int) -> None:
    """Raise :class:`OffPolicyError` if training should not begin at this drift. NaN is beyond every limit."""
    if not found <= foreign.max_drift:
        raise OffPolicyError(
            f"before update {iteration} the policy has moved too far from the policy that made these rollouts: drift "
            f"{found:.3g}, at most {foreign.max_drift:g} is allowed; further updates on them would say nothing of a "
            "real run"
        )


def _by_rollout(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the units grouped by rollout, because a micro-batch uses the weights of a single rollout."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit[0].partition("/")[0], []).append(unit)
    return [*found.values()]
