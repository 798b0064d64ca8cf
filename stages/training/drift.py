"""The drift of an update from the policies that made its rollouts, recorded for every trained transition."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from cosmos_rl_core.algorithms._base import Loss, Transitions
from cosmos_rl_core.algorithms._needs import DRIFT_METRICS
from cosmos_rl_core.errors import DriftError
from cosmos_rl_core.estimates.sample_size import effective_sample_size
from stages import contracts
from stages.formats.samples import place_of
from stages.formats.tables import to_parquet
from stages.training.trainer import MicroBatch, Trainer, Watcher


class DriftWatch(Watcher):
    """A watcher that records the drift of every trained transition, and applies the algorithm's limits on drift."""

    def __init__(self, max_logp_drift: float, trainer: Trainer, contents: Sequence[str]) -> None:
        self.max_logp_drift, self.trainer, self.context = max_logp_drift, trainer, trainer.context
        self._contents = contents
        self.rows: list[dict[str, Any]] = []
        self._worst: list[Any] = [0.0, "", 0]
        """Drift, sample and step of the transition with the largest drift."""
        self._ended_at: float | None = None

    def write(self) -> None:
        """Write ``transitions.parquet`` with all ranks' rows, and add the effective sample size to the trainer's rows.
        Collective.
        """
        ranks = self.context.ranks
        rows = [row for ranks_rows in ranks.gather(self.rows if ranks.leads else []) for row in ranks_rows]
        if ranks.rank != 0:
            return
        table = pd.DataFrame(rows).sort_values(["optimizer_step", "rollout", "sample_id", "step"], ignore_index=True)
        self.context.attempt.put(contracts.Update.TRANSITIONS, to_parquet(table))
        sizes = {index: effective_sample_size(part["log_ratio"]) for index, part in table.groupby("optimizer_step")}
        for row in self.trainer.rows:
            row["effective_sample_size"] = sizes[int(row["step"]) - self.trainer.steps.first_step]

    def summary(self) -> dict[str, Any]:
        """Return numbers of the last optimizer step."""
        ended = {} if self._ended_at is None else {"ended_before_step": self._ended_at}
        return self.trainer.last("approx_kl", "clipped") | ended

    def saw(self, index: int, micro: MicroBatch, loss: Loss) -> None:
        if not isinstance(micro.batch, Transitions) or micro.weight == 0:
            return
        # Only these: the numbers are read at the end of the step, and until then the micro-batch would keep its memory.
        names, steps = micro.names, micro.steps

        def take(numbers: list[float]) -> None:
            columns = [numbers[place :: len(names)] for place in range(len(names))]
            for sample_id, step, values in zip(names, steps, columns, strict=True):
                named_values = dict(zip(DRIFT_METRICS, values, strict=True))
                self._worst = max(self._worst, [named_values["ratio_drift"], sample_id, step], key=_severity)
                place, name = place_of(sample_id)
                named = {"optimizer_step": index, "rollout": self._contents[place], "sample_id": name, "step": step}
                self.rows.append(named | named_values)

        self.trainer.readings.want(torch.stack([loss.metrics[name] for name in DRIFT_METRICS]), take)

    def may_step(self, index: int, means: dict[str, float]) -> bool:
        """Return whether the weights may move. All ranks see the same numbers and decide alike. Collective."""
        self._check(*max(self.context.ranks.gather(self._worst), key=_severity))
        limit = self.trainer.algorithm.needs.max_drift
        if limit is None or means["approx_kl"] <= limit:
            return True
        self._ended_at = self.trainer.steps.first_step + index
        drift = f"approx_kl is {means['approx_kl']:.3g} before optimizer step {self._ended_at}"
        self.context.outcome.note(f"{drift}, more than max_drift = {limit:g}: training on these rollouts ends")
        return False

    def _check(self, drift: float, key: str, step: int) -> None:
        if not drift <= self.max_logp_drift:
            raise DriftError(
                f"sample {place_of(key)[1]}, step {step}: the logarithm of the ratio is {drift:.3g} although the "
                f"weights are the rollout's; at most {self.max_logp_drift:g} is allowed (max_logp_drift, "
                "by default half of clip_ratio). Rollout and update do not compute the same: look at dtypes, kernels "
                "and conditioning, or raise max_logp_drift"
            )


def _severity(worst: list[Any]) -> tuple[bool, list[Any]]:
    """Return the sort key of a drift; NaN is worse than any number."""
    return math.isnan(worst[0]), worst
