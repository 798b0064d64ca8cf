"""Optimizer steps of a VLM on rows of packed conversations."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.conversations.packing import Inputs, token_losses
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.weights.policy_weights import PolicyWeights
from stages.context import Context
from stages.training.stepper import Stepper


@dataclass(frozen=True)
class PackedRow:
    """Conversations of one forward and backward pass."""

    inputs: Inputs
    factor: float
    """Factor on the sum of the losses of its tokens; 0 pads a rank that has fewer rows."""


class VlmTrainer(Stepper):
    """A policy of a VLM. The loss of a step is the sum of ``factor`` times the losses of tokens, over all ranks."""

    def __init__(
        self, model: Any, weights: PolicyWeights, steps: OptimizerSteps, param_dtype: ParamDtype, context: Context
    ) -> None:
        super().__init__(weights, steps, context)
        self.model = model
        self.param_dtype: ParamDtype = param_dtype

    def step(self, index: int, rows: Iterable[PackedRow]) -> None:
        """Do one optimizer step from this rank's rows. Collective.

        A row without labels is computed like the others: ranks that share weights must do equal numbers of passes.
        """
        total, count = 0.0, 0
        for row in rows:
            self.sign_of_life(index)
            losses = self._losses(row.inputs)
            # Texts alone pass no part of the vision tower: if only such parts train, they have no gradient.
            if losses.requires_grad:
                (losses.sum() * row.factor).backward()
            total += float(losses.detach().double().sum()) * row.factor
            count += len(losses) if row.factor else 0
        found = self.group.gather([total, count])
        numbers = {"loss": sum(one for one, _ in found), "label_tokens": float(sum(some for _, some in found))}
        self.weights.collect_gradients()
        moved = self.move(index) or {"grad_norm": math.nan, "lr": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        self.rows.append({"step": self.steps.first_step + index} | moved | numbers)

    def _losses(self, inputs: Inputs) -> Tensor:
        device = self.group.device
        with computes_in(self.param_dtype, device):
            return token_losses(self.model, {name: tensor.to(device) for name, tensor in inputs.items()})
