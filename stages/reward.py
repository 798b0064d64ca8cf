"""Scores of generated samples. A sample that cannot be scored is excluded and counted; it never gets a number."""

import json
import math
import time
from typing import Any

import pandas as pd

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.errors import ArtifactError, ConfigError, DivergenceError, RewardError, UnavailableError
from cosmos_rl_core.rewards._answers import entries, scored, words
from cosmos_rl_core.rewards._base import LatentSample, Reward, Sample
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import holds
from stages.artifacts.request import Request
from stages.context import Context
from stages.contracts import MEDIA, RECORDS, TENSORS
from stages.formats.samples import StoredSample, num_units, read_rows, read_unit, unit_name
from stages.formats.tables import to_parquet

_AWAY = (UnavailableError, ConnectionError, TimeoutError)
"""Errors of a scorer that is away, which are no sample's fault."""
_PASSING = (ConfigError, *_AWAY)
_NOT_FINITE = DivergenceError("the sample is not finite, so there is no picture to score")
_CALL_COLUMNS = ["shard_samples", "attempt", "failed", "seconds"]


def run(request: Request, context: Context) -> dict[str, Any]:
    """Write ``scores.parquet``: ``sample_id, prompt_id, score, valid, scorer``.

    Records hold the rest: ``answers.parquet`` (``sample_id, error, details``), and ``calls.parquet`` with a row a call.

    Raises :class:`RewardError`, naming the samples, if more than the allowed share failed, and :class:`DivergenceError`
    if more than that are not finite.
    """
    config = request.settings(contracts.Reward)
    samples = Artifact(request.one("samples"))
    reward: Reward = plugins.load("rewards", config.reward.name).Reward(config.reward)
    part = TENSORS if config.reads == "latents" else MEDIA
    if reward.version != config.scorer:
        raise ConfigError(f"this process would score with {reward.version}, the request asks for {config.scorer}")
    total = num_units(samples)
    context.layout({"units": [unit_name(part, number) for number in range(total)]})
    rows: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for number in range(total):
        context.progress("scoring", number, total)
        scores_name, answers_name = f"scores/{number:05d}.json", f"{RECORDS}answers/{number:05d}.json"

        def make(number: int = number, files: tuple[str, str] = (scores_name, answers_name)) -> dict[str, bytes]:
            made = _score(reward, list(read_unit(samples, number, part)), config, calls)
            return {file: canonical_json(rows) for file, rows in zip(files, made, strict=True)}

        ids = [row["sample_id"] for row in read_rows(samples, number)]
        context.attempt.shard(number, make, keep=_all_scored, check=holds((scores_name, answers_name), ids))
        rows += json.loads(context.attempt.read(scores_name))
        answers += json.loads(context.attempt.read(answers_name))
    context.progress("scoring", total, total)
    table = pd.DataFrame(rows)
    _refuse_too_many(table, answers, config)
    context.attempt.put(contracts.Reward.SCORES, to_parquet(table))
    context.attempt.put(contracts.Reward.ANSWERS, to_parquet(pd.DataFrame(answers)))
    context.attempt.put(contracts.Reward.CALLS, to_parquet(pd.DataFrame(calls, columns=_CALL_COLUMNS)))
    return _summary(table, config.reward.label)


def _sample(stored: StoredSample) -> Sample | LatentSample:
    """Return the sample for a reward. Raises :class:`ArtifactError` if its bytes cannot be decoded: that is damage."""
    row = stored.row
    facts = row["sample_id"], row["prompt_id"], row["prompt"]
    try:
        if (latents := stored.final_latents) is not None:
            return LatentSample(*facts, latents, metadata=row["metadata"])
        return Sample(*facts, stored.pixels, metadata=row["metadata"])
    except Exception as error:  # decoders raise whatever they like
        what = stored.extension or "latents"
        raise ArtifactError(f"sample {stored.sample_id}: its {what} cannot be decoded: {error}") from error


def _score(
    reward: Reward, stored: list[StoredSample], config: contracts.Reward, calls: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the score rows of one unit, and the answers that they come from.

    Failed samples are tried again together, up to ``max_attempts`` times in all. The reward never gets a sample that is
    not finite.
    """
    label = config.reward.label
    results: dict[str, dict[str, Any] | Exception] = {s.sample_id: _NOT_FINITE for s in stored if not s.finite}
    waiting = [_sample(one) for one in stored if one.finite]
    for attempt in range(config.max_attempts if waiting else 0):
        started_s = time.monotonic()
        outcomes = _outcomes(reward, waiting, label)
        results |= {sample.sample_id: outcome for sample, outcome in zip(waiting, outcomes, strict=True)}
        failed = [s for s in waiting if isinstance(results[s.sample_id], Exception)]
        seconds = time.monotonic() - started_s
        calls.append({"shard_samples": len(waiting), "attempt": attempt, "failed": len(failed), "seconds": seconds})
        waiting = failed
        if not waiting:
            break
    rows = [_row(one, results[one.sample_id], config) for one in stored]
    return rows, [_answer(one, results[one.sample_id]) for one in stored]


def _outcomes(reward: Reward, samples: list[Any], label: str) -> list[dict[str, Any] | Exception]:
    """Return scores or a failure for each sample. If scoring them together fails, each is scored alone.

    Raises errors that are no sample's fault: :class:`UnavailableError`, a lost connection or a timeout, because the
    scorer is away, and :class:`ConfigError`, because it would fail all samples.
    """
    try:
        found = [scored(entry, label) for entry in entries(reward.score([*samples]), len(samples))]
    except _PASSING:
        raise
    except Exception as error:
        if len(samples) == 1:
            return [error]
        return [outcome for sample in samples for outcome in _outcomes(reward, [sample], label)]
    for outcome in found:
        if isinstance(outcome, _AWAY):
            raise outcome
    return found


def _row(sample: StoredSample, outcome: dict[str, Any] | Exception, config: contracts.Reward) -> dict[str, Any]:
    failed = isinstance(outcome, Exception)
    return {
        "sample_id": sample.sample_id,
        "prompt_id": sample.row["prompt_id"],
        "score": None if failed else float(outcome[config.reward.label]),
        "valid": not failed,
        "scorer": config.scorer,
    }


def _answer(sample: StoredSample, outcome: dict[str, Any] | Exception) -> dict[str, Any]:
    failed = isinstance(outcome, Exception)
    return {
        "sample_id": sample.sample_id,
        "error": words(outcome) if isinstance(outcome, Exception) else "",
        "details": "{}" if failed else json.dumps(outcome, sort_keys=True),
    }


def _all_scored(files: dict[str, bytes]) -> bool:
    """Return whether another attempt may adopt the unit: a sample that failed now may be scored then.

    Samples that are not finite never can be.
    """
    return all(row.get("error", "") in ("", words(_NOT_FINITE)) for data in files.values() for row in json.loads(data))


def _refuse_too_many(table: pd.DataFrame, answers: list[dict[str, Any]], config: contracts.Reward) -> None:
    failed = [answer for answer in answers if answer["error"]]
    allowed = config.max_failed_fraction * len(table)
    if len(failed) <= allowed:
        return
    lost = [answer for answer in failed if answer["error"] == words(_NOT_FINITE)]
    if len(lost) > allowed:
        raise DivergenceError(f"{len(lost)} of {len(table)} samples are not finite, {_more(lost, config)}")
    label = config.reward.label
    raise RewardError(f"{label} could not score {len(failed)} of {len(table)} samples, {_more(failed, config)}")


def _more(failed: list[dict[str, Any]], config: contracts.Reward) -> str:
    shown = "; ".join(f"{answer['sample_id']} ({answer['error']})" for answer in failed[:10])
    dots = " ..." if len(failed) > 10 else ""
    return f"more than max_failed_fraction = {config.max_failed_fraction}: {shown}{dots}"


def _summary(table: pd.DataFrame, name: str) -> dict[str, Any]:
    scores = table.loc[table["valid"], "score"].astype("float64")
    error = float(scores.std(ddof=1) / math.sqrt(len(scores))) if len(scores) > 1 else None
    failed = len(table) - len(scores)
    return {name: float(scores.mean()), "standard_error": error, "scored": len(scores)} | (
        {"failed": failed} if failed else {}
    )
