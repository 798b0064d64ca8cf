"""Optimizer steps on the weights of a policy, whatever the loss. All trainers share this."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pandas as pd
from torch import Tensor

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.errors import ArtifactError, CosmosRLError, DivergenceError
from cosmos_rl_core.parallel.checksums import checksums
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.sharding import Shards
from cosmos_rl_core.training.optimizer import (
    load_optimizer_state,
    make_optimizer,
    move,
    optimizer_state,
    state_shards,
    summed_norms,
)
from cosmos_rl_core.weights.parts import CURRENT, EMA, OPTIMIZER, SCHEDULE
from cosmos_rl_core.weights.policy_weights import PolicyWeights
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.contracts import METRICS
from stages.execution.context import Context
from stages.formats.policies import read_part, write_part
from stages.formats.tables import to_parquet
from stages.training.readings import Readings

CLOCKS = f"{SCHEDULE}/clocks.json"
NONFINITE = "nonfinite_steps"
"""Steps skipped for non-finite gradients. The clocks count the consecutive ones at the end, the summary counts all."""


class Stepper:
    """A policy with its copies, optimizer and clocks. All ranks do the same steps, each on its share of the work."""

    nonfinite_in_a_row: int = 0
    """Consecutive optimizer steps skipped until now because their gradients were not finite."""

    def __init__(self, weights: PolicyWeights, steps: OptimizerSteps, context: Context[Group]) -> None:
        self.weights, self.context = weights, context
        self.steps, self.group = steps, context.ranks
        self.rows: list[dict[str, float]] = []
        self.readings = Readings()
        """Numbers of the current step that are still on the device."""
        self._norms: list[float] = []
        self._num_nonfinite = 0
        settings = {"betas": steps.betas, "eps": steps.epsilon, "weight_decay": steps.weight_decay}
        self.optimizer = make_optimizer(weights.parameters, steps.optimizer, **settings)

    def resume(self, policy: Input) -> None:
        """Continue with the optimizer's state and the clocks of a policy."""
        self.nonfinite_in_a_row = _clocks(policy).get(NONFINITE, 0)
        state = read_part(policy, OPTIMIZER, state_shards(self.weights.shards), self.context.progress, group=self.group)
        load_optimizer_state(self.optimizer, self.weights.parameters, state)

    def read(self) -> None:
        """Sum the gradients over the ranks, and read their norms with all other readings of the step. Collective.

        This is the only time that a step waits for the device.
        """
        self.weights.collect_gradients()
        self.readings.want(summed_norms(self.weights.parameters, self.group, self.weights.shards), self._take_norms)
        self.readings.read()

    def _take_norms(self, norms: list[float]) -> None:
        self._norms = norms

    def move(self, index: int) -> dict[str, float] | None:
        """Move the weights by the gradients that :meth:`read` summed, and update the average.

        Returns gradient norm and learning rate; None if the step is skipped. All ranks decide alike, because the norm
        is taken of the gradients summed over ranks.
        """
        steps = self.steps
        try:
            moved = move(
                self.optimizer,
                self.weights.parameters,
                self._norms,
                lr=steps.lrs[index],
                max_norm=steps.grad_norm_clip,
            )
        except DivergenceError as error:
            if self.nonfinite_in_a_row >= steps.max_nonfinite:
                raise
            self.nonfinite_in_a_row += 1
            self._num_nonfinite += 1
            in_a_row = f"{self.nonfinite_in_a_row} in a row, at most {steps.max_nonfinite} are allowed"
            self.context.outcome.note(f"optimizer step {steps.first_step + index} is skipped ({in_a_row}): {error}")
            return None
        self.nonfinite_in_a_row = 0
        if (decay := steps.ema_decays[index]) is not None:
            self.weights.lerp_(EMA, decay)
        return moved

    def sign_of_life(self, finished: int) -> None:
        """Report the number of finished steps, so that stall detection sees that this process works."""
        self.context.progress("training", finished, len(self.steps.lrs))

    def write(self, copies: list[str], iteration: int) -> None:
        """Write the next policy version, once all ranks agree on its tensors. Collective.

        The clocks' optimizer step is the planned one, also if training on these rollouts ended early.
        """
        self.sign_of_life(len(self.rows))
        parts = {part: self.weights.here(part) for part in (CURRENT, *copies)}
        parts[OPTIMIZER] = optimizer_state(self.optimizer, self.weights.parameters)
        shards = self.weights.shards
        cuts = {part: state_shards(shards) if part == OPTIMIZER else shards for part in parts}
        self._agree(parts, cuts)
        for part, tensors in parts.items():
            write_part(self.context, part, tensors=tensors, shards=cuts[part])
        if self.group.rank == 0:
            last_step = self.steps.first_step + len(self.steps.lrs)
            nonfinite = {NONFINITE: self.nonfinite_in_a_row} if self.nonfinite_in_a_row else {}
            self.context.attempt.put_json(
                CLOCKS, {"iteration": iteration + 1, "optimizer_step": last_step, **nonfinite}
            )
            self.context.attempt.put(METRICS, to_parquet(pd.DataFrame(self.rows)))

    def _agree(self, parts: dict[str, dict[str, Tensor]], cuts: dict[str, Shards]) -> None:
        """Raise :class:`CosmosRLError` unless ranks that hold the same rows hold the same bits. Collective."""
        if self.group.world_size == 1:
            return
        held, mine = f"rows {self.weights.shards.index} of ", dict[str, int]()
        for part, tensors in parts.items():
            places = {name: f"{held if cuts[part].cuts(name) else ''}{part}/{name}" for name in tensors}
            mine |= checksums({places[name]: tensor for name, tensor in tensors.items()})
        # One digest of all whole tensors and one of all rows: the checksums of hundreds of ranks are sent only to name
        # the tensor that differs.
        kinds = {"": [], held: []}
        for place, one in mine.items():
            kinds[held if place.startswith(held) else ""].append([place, one])
        if not _unequal(self.group.gather({kind: digest(sums) for kind, sums in kinds.items()})):
            return
        found = self.group.gather(mine)
        if unequal := _unequal(found):
            raise CosmosRLError(
                f"the ranks ended with different bits of {len(unequal)} of {len({*chain(*found)})} tensors, e.g. "
                f"{unequal[0]}; a collective or a kernel does not give equal bits on all ranks"
            )

    def summary(self) -> dict[str, Any]:
        """Return the last step's loss and gradient norm, None if not finite, and the number of skipped steps."""
        left_out = {NONFINITE: self._num_nonfinite} if self._num_nonfinite else {}
        return self.last("loss", "grad_norm") | left_out

    def last(self, *names: str) -> dict[str, float | None]:
        """Return the named numbers of the last step; None for a number that is not finite."""
        return {name: value if math.isfinite(value := self.rows[-1][name]) else None for name in names}


def _unequal(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names under which ranks have different values, in order."""
    first: dict[str, Any] = {}
    return list(
        dict.fromkeys(name for each in found for name, one in each.items() if first.setdefault(name, one) != one)
    )


def check_clocks(policy: Input, iteration: int, first_step: int) -> None:
    """Raise :class:`ArtifactError` unless both clocks of the policy (iteration and step) are where this range begins.

    Policy version 0 has no clocks; they count as 0.
    """
    expected = {"iteration": iteration, "optimizer_step": first_step}
    found = {name: value for name, value in _clocks(policy).items() if name != NONFINITE}
    if found != expected:
        raise ArtifactError(f"the policy at {policy.url} has clocks {found}, this range begins at {expected}")


def _clocks(policy: Input) -> dict[str, int]:
    artifact = Artifact(policy)
    return artifact.json(CLOCKS) if artifact.names(CLOCKS) else {"iteration": 0, "optimizer_step": 0}
