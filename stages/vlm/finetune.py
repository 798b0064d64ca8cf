"""Training of a VLM from policy k to policy k + 1, by supervised steps on conversations."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from cosmos_rl_core.config.shared import OptimizerSteps
from cosmos_rl_core.conversations.packing import Inputs, bins, fillers, packed, token_losses
from cosmos_rl_core.parallel.distributed import Group
from cosmos_rl_core.parallel.precision import ParamDtype, computes_in
from cosmos_rl_core.vlms._base import Kind
from cosmos_rl_core.weights.parts import CURRENT, EMA
from cosmos_rl_core.weights.policy_weights import PolicyWeights
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.execution.context import Context
from stages.formats.policies import load_part
from stages.training.micro_batches import made_ahead, my_share
from stages.training.order import ItemOrder
from stages.training.stepper import Stepper, check_clocks
from stages.vlm.contracts import VlmFinetune
from stages.vlm.loading import load, prompts_of
from stages.vlm.tokens import Conversations, Tokens


def run(request: Request, context: Context[Group]) -> dict[str, Any]:
    """Write the next policy's parts and ``metrics.parquet``, one row per optimizer step."""
    config, policy, iteration = request.settings(VlmFinetune), request.one("policy"), request.iteration or 0
    check_clocks(policy, iteration, config.steps.first_step)
    tokens, prompts = Tokens(Artifact(request.one("tokens"))), prompts_of(config.vlm)
    layout = context.layout({"row_length": context.shrunk(config.row_length)})
    model, weights = load(config, prompts, context, config.param_dtype)
    load_part(weights, policy, CURRENT, context.progress, group=context.ranks)
    copies = [EMA] if config.keeps_ema else []
    for part in copies:
        weights.create(part)
        load_part(weights, policy, part, context.progress, into=part, optional=True, group=context.ranks)
    model.train()
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainer = VlmTrainer(model, weights, config.steps, config.param_dtype, context)
    trainer.resume(policy)
    rows = _Rows(config, tokens, Conversations(tokens, prompts, config.sources), model, layout["row_length"])
    if context.ranks.mesh is not None:
        rows.fill()
    order = ItemOrder(tokens.index["source"].to_numpy(), config.weights, config.batch_size, request.seed)

    def share(step: int) -> list[Any]:
        return my_share([[make] for make in rows.of([item for item, _ in order.of_step(step)])], context.ranks)

    first = config.steps.first_step
    with made_ahead(map(share, range(first, first + len(config.steps.lrs))), context.ranks.device) as steps:
        for index, some in enumerate(steps):
            trainer.step(index, some)
    trainer.write(copies, iteration)
    return trainer.summary()


@dataclass(frozen=True)
class PackedRow:
    """Conversations of one forward and backward pass."""

    inputs: Inputs
    factor: float
    """Factor on the sum of the row's token losses; 0 for a row that pads a rank with fewer rows."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "PackedRow":
        """Return the row with ``change`` applied to every tensor."""
        return replace(self, inputs={name: change(tensor) for name, tensor in self.inputs.items()})


class _Rows:
    """The rows of each optimizer step."""

    def __init__(
        self, config: VlmFinetune, tokens: Tokens, conversations: Conversations, model: Any, row_length: int
    ) -> None:
        self.config, self.conversations, self.model = config, conversations, model
        self.index, self.row_length = tokens.index, row_length
        self.fillers: dict[Kind, Any] = {}

    def fill(self) -> None:
        """Let every row from now on have a medium of each kind that the dataset has; rows without one get a filler.

        Ranks that share the weights of the vision tower must run it equally often.
        """
        kinds: list[Kind] = [kind for kind in ("image", "video") if int(self.index[f"{kind}s"].sum())]
        prompts = self.conversations.prompts
        self.fillers = dict(zip(sorted(kinds), fillers(prompts, kinds), strict=True))

    def of(self, items: list[int]) -> list[Any]:
        """Return a function for each row of a step on these conversations, which makes the row with a given weight.

        A planned row that is longer than the rows of this attempt is divided.
        """
        config = self.config
        about = self.index.iloc[items]
        lengths, labels = about["tokens"].tolist(), about["labels"].tolist()
        packs = getattr(self.conversations.prompts.processor, "packs", False)
        planned = _packed(range(len(items)), lengths, config.row_length) if packs else [[n] for n in range(len(items))]
        total, made = sum(labels), list[Any]()
        for row in planned:
            # Factors follow the planned rows, so that rows divided for lack of memory train the same objective.
            factor = 1 / total if config.balance_dp_token else 1 / (len(planned) * sum(labels[place] for place in row))
            parts = _packed(row, lengths, self.row_length) if packs else [row]
            made += [partial(self._made, [items[place] for place in part], factor) for part in parts]
        return made

    def _made(self, items: list[int], factor: float, weight: float) -> PackedRow:
        row = [self.conversations[item] for item in items]
        here = {kind for one in row for kind in ("image", "video") for visual in one.visuals if _is(visual, kind)}
        row += [filler for kind, filler in self.fillers.items() if kind not in here]
        return PackedRow(packed(self.model, row), factor * weight)


def _packed(places: Sequence[int], lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return the conversations at ``places`` in rows of at most ``room`` tokens, or of the longest conversation's."""
    own = [lengths[place] for place in places]
    return [[places[number] for number in row] for row in bins(own, max(room, *own))]


def _is(visual: Any, kind: Kind) -> bool:
    return f"{kind}_grid_thw" in visual.inputs


class VlmTrainer(Stepper):
    """A policy of a VLM. The loss of a step is the sum of ``factor`` times the losses of tokens, over all ranks."""

    def __init__(
        self,
        model: Any,
        weights: PolicyWeights,
        steps: OptimizerSteps,
        param_dtype: ParamDtype,
        context: Context[Group],
    ) -> None:
        super().__init__(weights, steps, context)
        self.model = model
        self.param_dtype: ParamDtype = param_dtype

    def step(self, index: int, rows: Iterable[PackedRow]) -> None:
        """Do one optimizer step from this rank's rows. Collective.

        A row without labels is computed like the others, because ranks that share weights must do equal numbers of
        passes.
        """
        total, count = 0.0, 0

        def take(numbers: list[float], factor: float) -> None:
            nonlocal total
            total += numbers[0] * factor

        for row in rows:
            self.sign_of_life(index)
            losses = self._losses(row.inputs)
            # A row of texts alone does not use the vision tower: if only that trains, the loss has no gradient.
            if losses.requires_grad:
                (losses.sum() * row.factor).backward()
            self.readings.want(losses.double().sum(), partial(take, factor=row.factor))
            count += len(losses) if row.factor else 0
        self.read()
        found = self.group.gather([total, count])
        numbers = {"loss": sum(one for one, _ in found), "label_tokens": float(sum(some for _, some in found))}
        moved = self.move(index) or {"grad_norm": math.nan, "lr": 0.0}
        self.optimizer.zero_grad(set_to_none=True)
        self.rows.append({"step": self.steps.first_step + index} | moved | numbers)

    def _losses(self, inputs: Inputs) -> Tensor:
        device = self.group.device
        with computes_in(self.param_dtype, device):
            return token_losses(self.model, inputs, device)
