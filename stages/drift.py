"""How far an update has moved from the policy that made its rollouts, recorded step by recorded step."""

from typing import Any

import pandas as pd

from cosmos_rl_core.algorithms._base import Loss, Transitions
from cosmos_rl_core.algorithms._policy_gradient import PolicyGradientOptions
from cosmos_rl_core.config.train import RewardedOptions
from cosmos_rl_core.errors import DivergenceError
from stages.runner import Context
from stages.samples import to_parquet
from stages.trainer import MicroBatch, Trainer

TRANSITIONS = "transitions.parquet"
COLUMNS = ("log_ratio", "log_ratio_per_dim", "ratio", "clipped", "approx_kl", "logp_drift")


class DriftWatch:
    """Watches a trainer's micro-batches of transitions; for other algorithms there is nothing to see."""

    def __init__(self, options: RewardedOptions, trainer: Trainer, context: Context) -> None:
        self.options = options if isinstance(options, PolicyGradientOptions) else None
        self.trainer, self.context = trainer, context
        self.rows: list[dict[str, Any]] = []
        self.stopped = 0
        if self.options is not None:
            trainer.watch = self._see

    def too_far(self) -> bool:
        """Whether the pass ends here: the mean over all ranks of the last optimizer step, so all ranks agree."""
        row = self.trainer.rows[-1]
        if self.options is None:
            return False
        row["effective_sample_size"] = row["ratio"] ** 2 / row["ratio_squared"]
        limit = self.options.max_drift
        if limit is None or row["approx_kl"] <= limit:
            return False
        self.stopped += 1
        drift = f"approx_kl {row['approx_kl']:.3g} after optimizer step {row['step']}"
        self.context.outcome.note(f"{drift}, more than max_drift = {limit:g}: this pass over the rollouts ends")

        return True

    def write(self) -> None:
        """Write ``transitions.parquet``, all ranks' rows in order."""
        if self.options is None:
            return
        rows = [row for ranks_rows in self.context.ranks.gather(self.rows) for row in ranks_rows]
        if self.context.ranks.rank == 0:
            table = pd.DataFrame(rows).sort_values(["optimizer_step", "sample_id", "step"], ignore_index=True)
            self.context.attempt.put(TRANSITIONS, to_parquet(table))

    def summary(self) -> dict[str, Any]:
        """Of the last optimizer step."""
        if self.options is None:
            return {}
        last = self.trainer.rows[-1]
        stopped = {"passes_ended_early": self.stopped} if self.stopped else {}
        return {"approx_kl": last["approx_kl"], "clipped": last["clipped"]} | stopped

    def _see(self, index: int, micro: MicroBatch, loss: Loss) -> None:
        if not isinstance(micro.batch, Transitions) or micro.weight == 0:
            return
        columns = {name: loss.metrics[name].tolist() for name in COLUMNS}
        for place, (sample_id, step) in enumerate(zip(micro.names, micro.steps, strict=True)):
            values = {name: column[place] for name, column in columns.items()}
            self._check(sample_id, step, values["logp_drift"])
            self.rows.append({"optimizer_step": index, "sample_id": sample_id, "step": step, **values})

    def _check(self, sample_id: str, step: int, logp_drift: float) -> None:
        assert self.options is not None
        if not logp_drift <= self.options.max_logp_drift:
            raise DivergenceError(
                f"sample {sample_id}, step {step}: the log-probability of the rollout and the one computed again with "
                f"its weights differ by {logp_drift:.3g} a dimension, more than max_logp_drift = "
                f"{self.options.max_logp_drift:g} (clip_ratio is {self.options.clip_ratio:g}); rollout and update do "
                "not compute the same: look at dtypes, kernels and conditioning, or raise max_logp_drift"
            )
