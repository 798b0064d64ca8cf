"""``metrics.jsonl``: the numbers of a run, in the order of the loop, read from its artifacts alone.

Every line is a JSON object with ``stage``; with ``iteration`` or, for an evaluation, ``policy_version``; and with
``step``, the number of optimizer steps of the policy, including the step of the line. A missing number is ``null``.
Names are those of cosmos-rl for the same quantity.

=============================================== =================================================== ===========
name                                            meaning                                             cosmos-rl's
=============================================== =================================================== ===========
``train/loss_avg``                              loss of an optimizer step                           yes
``train/policy_loss_avg``                       the term of the loss from rewards                   yes
``train/kl_loss_avg``                           KL divergence to the reference                      yes
``train/old_deviation_avg``                     squared distance to the old policy                  yes
``train/learning_rate``, ``train/grad_norm``    gradient norm before clipping                       yes
``GRPO/{policy,kl,data}_loss``                  the same, for policy gradient algorithms            yes
``GRPO/log_prob_ratio``                         mean ratio of new to old density                    yes
``GRPO/reward_mean``                            equal to ``train/reward_mean``                      yes
``GRPO/<reward>``, ``..._std``, ``_valid_rate`` scores of one reward; fraction of samples scored    yes
``train/{loss,policy_loss,kl_loss,...}_max``    maximum over samples                                yes
``train/<column>``                              any other column of ``metrics.parquet``             no
``train/reward_{mean,std,max,min}``             weighted rewards of the samples of an update        yes
``rollout/advantage_{mean,std,max,min}``        advantages of the samples that were trained on      yes
``train/excluded``                              samples that were not trained on                    no
``rollout/samples``, ``rollout/<number>``       the summary of a rollout                            no
``reward/<reward>_{mean,standard_error}``       scores of a rollout by one reward                   no
``reward/<reward>_{scored,failed}``             number of samples with and without a score          no
``val/<reward>_{mean,standard_error}``          the same for held-out samples                       no
``val/<reward>_{scored,failed}``                                                                    no
``val/reward_{avg,std,max,min}``                scores of the headline reward                       yes
``val/rollout_count``                           number of samples that it scored                    yes
``val/avg_loss``                                diffusion loss on held-out media                    yes
``val/avg_loss_standard_error``                                                                     no
``train/iteration_time``                        duration of the update in seconds                   yes
``{rollout/,reward/<r>_,val/<r>_}seconds``      duration of the stage in seconds                    no
=============================================== =================================================== ===========
"""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.files import read_entry
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.contracts import METRICS

FILE = "metrics.jsonl"
"""Name of the file, beside ``plan.json``."""

Number = float | int | None

TRAINED = {
    "loss": "train/loss_avg",
    "policy_loss": "train/policy_loss_avg",
    "kl": "train/kl_loss_avg",
    "old_deviation": "train/old_deviation_avg",
    "kl_max": "train/kl_loss_max",
    "lr": "train/learning_rate",
}
"""Columns of ``metrics.parquet`` and their names here; any other is ``train/<column>``."""
POLICY_GRADIENT = {
    "policy_loss": "GRPO/policy_loss",
    "kl": "GRPO/kl_loss",
    "data_loss": "GRPO/data_loss",
    "ratio": "GRPO/log_prob_ratio",
}
"""Replacements of these names for algorithms that train on recorded transitions."""


@dataclass(frozen=True)
class Line:
    """Numbers of one artifact or of one optimizer step."""

    stage: str
    """Last path component of the slot: ``update``, ``reward-ocr``, ``evaluate-ocr``."""
    k: int
    """Iteration; policy version for an evaluation."""
    step: int
    """Number of optimizer steps of the policy."""
    numbers: dict[str, Number]
    beside: bool = False
    """Whether it is a rollout that ran beside the update of the iteration before."""

    @property
    def judges(self) -> bool:
        """Return whether it is an evaluation on held-out data."""
        return self.stage == "validate" or self.stage.startswith("evaluate-")

    @property
    def position(self) -> int:
        """Return its position in the loop, which rises from wave to wave and from optimizer step to optimizer step.

        It depends on no other line. So the positions of a run that goes on past its planned end stay the same.
        """
        if self.stage == "rollout":
            # Beside an update: after the rewards that the update reads, before its steps.
            return self.step + 4 * self.k + (-1 if self.beside else 1)
        return self.step + 4 * self.k + (0 if self.judges else 2 if self.stage.startswith("reward-") else 3)

    @property
    def values(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "stage": self.stage,
            "policy_version" if self.judges else "iteration": self.k,
            "step": self.step,
            **self.numbers,
        }

    def encode(self) -> bytes:
        """Return the line of the file, with its newline."""
        return json.dumps(self.values, allow_nan=False).encode() + b"\n"


def steps_after(request: Request) -> int | None:
    """Return the policy's optimizer steps after this Request; None if its stage trains nothing."""
    if isinstance(request.config, contracts.Update | contracts.Finetune):
        return request.config.steps.first_step + len(request.config.steps.lrs)
    return None


def lines_of(request: Request, manifest: Manifest, step: int, headline: str) -> Iterator[Line]:
    """Yield the lines of one artifact, which may have none.

    ``step`` is the number of optimizer steps before it, ``headline`` the label of the reward that the run is judged by.
    Raises :class:`ArtifactError` if a table of the artifact is damaged.
    """
    stage, k = request.slot.rpartition("/")[2], request.iteration
    if k is None:
        return
    if isinstance(request.config, contracts.Reward):
        prefix = "val" if stage.startswith("evaluate-") else "reward"
        yield Line(stage, k, step, _scores(manifest, request.config.reward.label, prefix, headline))
    elif isinstance(request.config, contracts.Validate):
        said = {"avg_loss": "loss", "avg_loss_standard_error": "standard_error", "seconds": "seconds"}
        yield Line(stage, k, step, {f"val/{name}": _number(manifest.summary.get(key)) for name, key in said.items()})
    elif isinstance(request.config, contracts.Rollout):
        said = {key: value for key, value in manifest.summary.items() if not isinstance(value, str)}
        yield Line(stage, k, step, {f"rollout/{key}": _number(value) for key, value in said.items()})
    elif (after := steps_after(request)) is not None:
        config = request.config
        gradient = isinstance(config, contracts.Update) and algorithm_of(config.algorithm).needs.transitions
        names = TRAINED | POLICY_GRADIENT if gradient else TRAINED
        for row in _table(manifest, METRICS).to_dict("records"):
            reached = int(row.pop("step")) + 1
            yield Line(stage, k, reached, {names.get(str(n), f"train/{n}"): _number(v) for n, v in row.items()})
        yield Line(stage, k, after, (_rewards(request, manifest) if gradient else {}) | _update(manifest, gradient))


def _rewards(request: Request, manifest: Manifest) -> dict[str, Number]:
    """Return statistics of each single reward, without its weight."""
    assert isinstance(request.config, contracts.Update)
    table, numbers = _table(manifest, contracts.Update.ADVANTAGES), dict[str, Number]()
    for name, weight in request.config.reward_weights.items():
        if (column := f"reward.{name}") in table and weight != 0:
            found = _statistics(table[column] / weight)
            rate = float(table[column].notna().mean())
            numbers |= {f"GRPO/{name}": found["mean"], f"GRPO/{name}_std": found["std"]}
            numbers[f"GRPO/{name}_valid_rate"] = rate
    return numbers


def _scores(manifest: Manifest, name: str, prefix: str, headline: str) -> dict[str, Number]:
    said = {"failed": 0, **manifest.summary, "mean": manifest.summary.get(name)}
    keys = ("mean", "standard_error", "scored", "failed", "seconds")
    numbers = {f"{prefix}/{name}_{key}": _number(said.get(key)) for key in keys}
    if prefix == "val" and name == headline:
        numbers |= {"val/rollout_count": _number(said.get("scored")), "val/reward_avg": _number(said["mean"])}
        table = _table(manifest, contracts.Reward.SCORES)
        found = {} if table.empty else _statistics(table.loc[table["valid"], "score"])
        numbers |= {f"val/reward_{key}": value for key, value in found.items() if key != "mean"}
    return numbers


def _update(manifest: Manifest, gradient: bool) -> dict[str, Number]:
    """Return the numbers of a whole update; rewards and advantages only if it has them."""
    table, numbers = _table(manifest, contracts.Update.ADVANTAGES), dict[str, Number]()
    for column, name in (("reward", "train/reward"), ("advantage", "rollout/advantage")):
        if column in table:
            numbers |= {f"{name}_{key}": value for key, value in _statistics(table[column]).items()}
    if gradient:
        numbers["GRPO/reward_mean"] = numbers.get("train/reward_mean")
    if not table.empty:
        numbers["train/excluded"] = _number(manifest.summary.get("excluded", 0))
    return numbers | {"train/iteration_time": _number(manifest.summary.get("seconds"))}


def _statistics(column: pd.Series) -> dict[str, Number]:
    """Return mean, population std, max and min of the values that are not missing."""
    known = column.dropna().astype("float64")
    found = {"mean": known.mean(), "std": known.std(ddof=0), "max": known.max(), "min": known.min()}
    return {name: _number(float(value)) for name, value in found.items()}


def _table(manifest: Manifest, name: str) -> Any:
    """Return a parquet file of the artifact, untyped like pandas; an empty table if it has no file of that name."""
    if name not in manifest.files:
        return pd.DataFrame()
    data = read_entry(manifest.slot, manifest.files[name])
    return pd.read_parquet(io.BytesIO(data), engine="pyarrow")


def _number(value: Any) -> Number:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


class MetricsFile:
    """``metrics.jsonl`` in the store. It is written whole, and only if the stored file does not begin with its lines.

    A resumed run adds the lines of finished stages again. They neither shorten nor rewrite the stored file.
    """

    def __init__(self, url: str, stored: bytes = b"") -> None:
        self.url = url
        self._stored = stored
        self._lines = bytearray()
        self._agrees = True

    def add(self, line: bytes) -> bool:
        """Append a line. Return whether it is new: not at this place of the stored file."""
        start = len(self._lines)
        self._lines += line
        self._agrees = self._agrees and self._stored[start : len(self._lines)] == line
        return not self._agrees

    def write(self) -> None:
        """Store the lines, unless the stored file begins with them.

        Raises :class:`UnavailableError` if the store does not answer.
        """
        if not self._agrees:
            self._store()

    def finish(self) -> None:
        """Store the lines, unless the stored file is equal to them. Raises :class:`UnavailableError` likewise."""
        if self._lines != self._stored:
            self._store()

    def _store(self) -> None:
        data = bytes(self._lines)
        store.write(self.url, data)
        self._stored, self._agrees = data, True
