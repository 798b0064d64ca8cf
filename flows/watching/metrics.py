"""``metrics.jsonl``: the numbers of a run, in the order of the loop, read from its artifacts alone.

Every line is a JSON object with ``stage``; with ``iteration`` or, for an evaluation, ``policy_version``; and with
``step``, the number of optimizer steps of the policy, including the step of the line. A missing number is ``null``.
Names are cosmos-rl's for the same quantity.

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
``train/normalized_reward_{std,max,min}``       with ``mixing = "gdpo"``: the sum of rewards that   no
                                                were each normalised in their prompt; its mean is 0
``rollout/advantage_{mean,std,max,min}``        advantages of the samples that were trained on      yes
``train/excluded``                              samples that were not trained on                    no
``train/pairs``, ``train/pairs_dropped``        pairs that were trained on, and that were left out  no
``train/pairs_elsewhere``                       pairs of a file that are of other rollouts          no
``train/lost_to_floor``                         share of advantages lost to the floor, from 0.05    no
``train/prompts_held_back``                     prompts without a sample that passes the gates      no
``rollout/samples``, ``rollout/<number>``       the summary of a rollout                            no
``reward/<reward>_{mean,standard_error}``       scores of a rollout by one reward                   no
``reward/<reward>_{scored,failed}``             number of samples with and without a score          no
``reward/<reward>_z``                           their mean as a z-score against iteration 0         no
``reward/tripped``                              limits of early warning that tripped                no
``val/<reward>_{mean,standard_error}``          the same for held-out samples                       no
``val/<reward>_{scored,failed}``                                                                    no
``val/reward_{avg,std,max,min}``                scores of the headline reward                       yes
``val/rollout_count``                           number of samples that it scored                    yes
``val/avg_loss``                                loss on held-out media or conversations             yes
``val/avg_loss_standard_error``                                                                     no
``val/correct_<dataset>``                       share of right answers to held-out questions        no
``val/correct_<dataset>_error``                 its standard error                                  no
``val/unfinished``                              answers that ``max_new_tokens`` cuts off            no
``train/iteration_time``                        duration of the update in seconds                   yes
``{rollout/,reward/<r>_,val/<r>_}seconds``      duration of the stage in seconds                    no
=============================================== =================================================== ===========
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from cosmos_rl_core.algorithms._advantages import BEATS, HELD, floor_share
from cosmos_rl_core.algorithms._base import algorithm_of
from cosmos_rl_core.canonical import sha256
from cosmos_rl_core.config.shared import Trains
from cosmos_rl_core.storage import store
from stages import contracts
from stages.artifacts.files import read_entry
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.contracts import METRICS
from stages.formats.tables import from_parquet
from stages.scoring import held_out
from stages.scoring.advantages import PAIRS, PAIRS_DROPPED, PAIRS_ELSEWHERE
from stages.scoring.rewards import placed

"""Name of the file, next to ``plan.json``."""

_LOST = 0.05
"""Smallest share of lost advantages that is reported."""
_AS_STORED = 1
"""Newest version of ``update`` whose lines show rewards as they are stored, without the numbers of later versions.

Lines of its artifacts stay as they were written, so that an audit of older runs holds.
"""
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
"""Names in place of :data:`TRAINED` for algorithms that train on recorded transitions."""

PLACES = {
    name: place
    for place, name in enumerate(
        ("validate", "evaluate", "judged", "rollout", "reward", "warn", "ahead", "update", "fragment")
    )
}
"""Order of stages within an iteration. Each optimizer step adds one to the position of the update."""
AHEAD = PLACES["ahead"] - len(PLACES)
"""Order of a rollout that runs during the update of the iteration before its own, in place of ``rollout``."""


@dataclass(frozen=True)
class Line:
    """Numbers of one artifact or of one optimizer step."""

    stage: str
    """Last path component of the slot: ``update``, ``reward-ocr``, ``evaluate-ocr``."""
    k: int
    """Iteration; policy version for an evaluation."""
    step: int
    """Number of optimizer steps of the policy."""
    numbers: dict[str, Any]
    """Values by name. A value that is no finite number counts as missing."""
    ahead: bool = False
    """Whether it is a rollout that ran during the update of the iteration before."""

    @property
    def is_evaluation(self) -> bool:
        """Return whether the line is about an evaluation on held-out data."""
        return self.stage == "validate" or self.stage.startswith("evaluate-")

    @property
    def position(self) -> int:
        """Return the line's position in the loop, which rises from wave to wave and from optimizer step to step.

        It depends on no other line, so positions stay the same when a run continues past its planned end.
        """
        if self.stage == "rollout":
            # During an update: after the rewards and warnings that precede the update, before its steps.
            place = AHEAD if self.ahead else PLACES["rollout"]
        else:
            place = PLACES.get(self.stage.partition("-")[0], PLACES["update"])
        return self.step + len(PLACES) * self.k + place

    def shown_at(self, *, held_out: bool) -> int:
        """Return the position in the loop of pictures of this iteration or, if ``held_out``, of this policy version."""
        return self.step + len(PLACES) * self.k + PLACES["judged" if held_out else "fragment"]

    @property
    def known(self) -> list[tuple[str, Any]]:
        """Return the names and values that are not missing."""
        return [(key, value) for key, value in self.values.items() if value is not None]

    @property
    def values(self) -> dict[str, Any]:
        """Return the values of the JSON object; None for a missing number."""
        return {
            "stage": self.stage,
            "policy_version" if self.is_evaluation else "iteration": self.k,
            "step": self.step,
            **{name: value if _is_number(value) else None for name, value in self.numbers.items()},
        }

    def encode(self) -> bytes:
        """Return the line of the file, with its newline."""
        return json.dumps(self.values, allow_nan=False).encode() + b"\n"


def steps_after(request: Request) -> int | None:
    """Return the number of the policy's optimizer steps after this Request; None if its stage trains nothing."""
    if isinstance(request.config, Trains):
        return request.config.steps.first_step + len(request.config.steps.lrs)
    return None


def wave_lines(pairs: Sequence[tuple[Request, Manifest]], step: int, headline: str) -> list[Line]:
    """Return the lines of a wave in order: the lines of an update come after the stages that ran next to it.

    ``step`` and ``headline`` are as in :func:`lines_of`.
    """
    trains = any(steps_after(request) is not None for request, _ in pairs)
    lines: list[Line] = []
    # A rollout during an update is generated by the policy before it.
    for request, manifest in sorted(pairs, key=lambda pair: steps_after(pair[0]) is not None):
        ahead = trains and steps_after(request) is None
        lines += [replace(line, ahead=ahead) for line in lines_of(request, manifest, step, headline)]
    return lines


def lines_of(request: Request, manifest: Manifest, step: int, headline: str) -> Iterator[Line]:
    """Yield the lines of one artifact; some artifacts have none.

    ``step`` is the number of optimizer steps before it, ``headline`` the label of the reward that the run is judged by.
    Raises :class:`ArtifactError` if a table of the artifact is damaged.
    """
    stage, k, config = request.slot.rpartition("/")[2], request.iteration, request.config
    if k is None:
        return
    if isinstance(config, contracts.Reward):
        prefix = "val" if stage.startswith("evaluate-") else "reward"
        yield Line(stage, k, step, _scores(manifest, config.reward.label, prefix, headline))
    elif (reader := held_out.reader_of(config.name)) is not None:
        yield Line(stage, k, step, {f"val/{name}": value for name, value in reader.numbers_of(manifest).items()})
    elif isinstance(config, contracts.Rollout):
        found = {f"rollout/{name}": value for name, value in manifest.summary.items()}
        yield Line(stage, k, step, {k: v for k, v in found.items() if not isinstance(v, str)})
    elif isinstance(config, contracts.Warn):
        names = ((name, name.removesuffix("_z")) for name in manifest.summary if name.endswith("_z"))
        z = {f"reward/{label}_z": manifest.summary[name] for name, label in names}
        yield Line(stage, k, step, z | {"reward/tripped": manifest.summary.get("tripped")})
    elif (after := steps_after(request)) is not None:
        names, rewards = TRAINED, {}
        weights = config.reward_weights if isinstance(config, contracts.Update) else {}
        if isinstance(config, contracts.Update) and algorithm_of(config.algorithm).needs.transitions:
            names, rewards = TRAINED | POLICY_GRADIENT, _rewards(weights, manifest)
        for row in _table(manifest, METRICS).to_dict("records"):
            reached = int(row.pop("step")) + 1
            found = {names.get(str(n), f"train/{n}"): value for n, value in row.items()}
            yield Line(stage, k, reached, found)
        yield Line(stage, k, after, rewards | _update(weights, manifest))


def _rewards(weights: Mapping[str, float], manifest: Manifest) -> dict[str, Any]:
    """Return statistics of the sum of rewards and of each reward, without its weight, under their names for GRPO."""
    table = _rewarded(weights, manifest)
    numbers: dict[str, Any] = {"GRPO/reward_mean": _statistics(table, "reward").get("mean")}
    for name, weight in weights.items():
        if (column := f"reward.{name}") in table and weight != 0:
            found = _statistics(table, column, weight)
            numbers |= {f"GRPO/{name}": found["mean"], f"GRPO/{name}_std": found["std"]}
            numbers[f"GRPO/{name}_valid_rate"] = table[column].notna().mean()
    return numbers


def _scores(manifest: Manifest, name: str, prefix: str, headline: str) -> dict[str, Any]:
    said = {"failed": 0, **manifest.summary, "mean": manifest.summary.get(name)}
    keys = ("mean", "standard_error", "scored", "failed", "seconds")
    numbers = {f"{prefix}/{name}_{key}": said.get(key) for key in keys}
    if prefix == "val" and name == headline:
        numbers |= {"val/rollout_count": said.get("scored"), "val/reward_avg": said["mean"]}
        table = _table(manifest, contracts.Reward.SCORES)
        found = {} if table.empty else _statistics(table[table["valid"]], "score")
        numbers |= {f"val/reward_{key}": value for key, value in found.items() if key != "mean"}
    return numbers


def _rewarded(weights: Mapping[str, float], manifest: Manifest) -> Any:
    """Return the advantages of an update with the rewards that its lines show."""
    table = _table(manifest, contracts.Update.ADVANTAGES)
    return table if manifest.version <= _AS_STORED else _as_scored(weights, table)


def _as_scored(weights: Mapping[str, float], table: Any) -> Any:
    """Return advantages with weighted scores as rewards, if the mixing stored normalised scores in their place.

    The sum of the normalised scores, whose mean is 0 whatever the policy does, becomes the column ``normalized``.
    A sample that gates hold back gets the scores of the lowest sample of its prompt that passes, as it would without
    normalisation.
    """
    if f"score.{next(iter(weights), '')}" not in table:
        return table
    # Samples that do not count have no reward. Samples that are held back have none until they are placed.
    counts = table["reward"].notna() & ~_held(table)
    scored = {f"reward.{name}": w * table[f"score.{name}"].where(counts) for name, w in weights.items()}
    table = table.assign(**scored, reward=sum(scored.values()), normalized=table["reward"])
    if HELD not in table:
        return table
    table = table.assign(valid=counts, **{HELD: _held(table)})
    return pd.concat([placed(samples) for _, samples in table.groupby("rollout", sort=False)])


def _held(table: Any) -> Any:
    """Return a mask of the samples that gates hold back at the lowest place of their prompt. All of them are finite."""
    return table[HELD].eq(other=True) if HELD in table else pd.Series(data=False, index=table.index)


def _update(weights: Mapping[str, float], manifest: Manifest) -> dict[str, Any]:
    """Return the numbers of a whole update; rewards and advantages only if it has them."""
    table, numbers = _rewarded(weights, manifest), dict[str, Any]()
    normalized = _statistics(table, "normalized").items()
    numbers |= {f"train/normalized_reward_{key}": value for key, value in normalized if key != "mean"}
    for column, name in (("reward", "train/reward"), ("advantage", "rollout/advantage")):
        numbers |= {f"{name}_{key}": value for key, value in _statistics(table, column).items()}
    if not table.empty:
        numbers["train/excluded"] = manifest.summary.get("excluded", 0)
    if BEATS in table:
        counted = {PAIRS: 0, PAIRS_DROPPED: 0} | manifest.summary
        names = (PAIRS, PAIRS_DROPPED, PAIRS_ELSEWHERE)
        numbers |= {f"train/{name}": counted[name] for name in names if name in counted}
    if manifest.version > _AS_STORED:
        if lost := _lost_to_floor(table, manifest.config.get("algorithm", {})):
            numbers["train/lost_to_floor"] = lost
        if manifest.config.get("gates"):
            numbers["train/prompts_held_back"] = manifest.summary.get(contracts.Update.HELD_BACK, 0)
    return numbers | {"train/iteration_time": manifest.summary.get("seconds")}


def _lost_to_floor(table: Any, algorithm: Mapping[str, Any]) -> float | None:
    """Return the largest share of a reward's advantages that the floor of deviations takes away; None below 5 %."""
    if not {"reward", "prompt_id"} <= {*table.columns}:
        return None
    overall, prompts, counts = bool(algorithm.get("global_std")), table["prompt_id"].to_numpy(), table["reward"].notna()
    if single := [name for name in table.columns if name.startswith("score.")]:
        # Each score is divided by the deviation within its prompt, whatever divides their sum.
        overall, counts = False, counts & ~_held(table)
    elif algorithm.get("reward_average"):
        single = [name for name in table.columns if name.startswith("reward.")]
        # With several rewards, samples that are held back get their place after the division.
        counts = counts & ~_held(table) if len(single) > 1 else counts
    columns = (table[name].where(counts).to_numpy("float64", na_value=math.nan) for name in single or ["reward"])
    lost = max(floor_share(rewards, prompts, global_std=overall) for rewards in columns)
    return lost if lost >= _LOST else None


def _statistics(table: Any, column: str, weight: float = 1.0) -> dict[str, float]:
    """Return mean, population std, max and min of a column's values divided by ``weight``; empty without it."""
    if column not in table:
        return {}
    known = table[column].dropna().astype("float64") / weight
    return {"mean": known.mean(), "std": known.std(ddof=0), "max": known.max(), "min": known.min()}


def _table(manifest: Manifest, name: str) -> Any:
    """Return a parquet file of the artifact, untyped like pandas; an empty table if it has no file of that name."""
    if name not in manifest.files:
        return pd.DataFrame()
    data = read_entry(manifest.slot, manifest.files[name])
    return from_parquet(data)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class MetricsFile:
    """``metrics.jsonl`` in the store. It is written whole, and only if the stored file does not begin with its lines.

    A resumed run adds the lines of finished stages again, which leaves the stored file as it is.
    """

    def __init__(self, url: str, stored: bytes = b"") -> None:
        self.url = url
        self._stored = stored
        self._lines = bytearray()
        self._agrees = True

    @property
    def digest(self) -> str:
        """Return the digest of the stored bytes."""
        return sha256(self._stored)

    def add(self, line: bytes) -> bool:
        """Append a line. Return whether it is new, which means that the stored file does not have it at this place."""
        start = len(self._lines)
        self._lines += line
        self._agrees = self._agrees and self._stored[start : len(self._lines)] == line
        return not self._agrees

    def write(self, *, whole: bool = False) -> None:
        """Store the lines, unless the stored file begins with them; with ``whole``, unless it is equal to them.

        Raises :class:`UnavailableError` if the store does not answer.
        """
        if not self._agrees or (whole and self._lines != self._stored):
            data = bytes(self._lines)
            store.write(self.url, data)
            self._stored, self._agrees = data, True
