"""Scores of generated samples. A sample that cannot be scored is excluded and counted; it never gets a number."""

import json
import time
from typing import Any

import pandas as pd

from cosmos_rl_core import plugins
from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.errors import ArtifactError, ConfigError, DivergenceError, RewardError, UnavailableError
from cosmos_rl_core.foreign_errors import is_out_of_memory
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

Rows = list[dict[str, Any]]
Outcome = dict[str, Any] | Exception
"""A sample's scores by name, or why it has none."""
_AWAY = (UnavailableError, ConnectionError, TimeoutError)
"""Errors of a scorer that is away, which are no sample's fault."""
_PASSING = (ConfigError, *_AWAY)
_CALL = ["shard_samples", "attempt", "failed", "seconds"]
_NOT_FINITE = DivergenceError("the sample is not finite, so there is no picture to score")


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
        raise ConfigError(f"this process scores with {reward.version}, the request asks for {config.scorer}")
    total = num_units(samples)
    context.layout({"units": [unit_name(part, number) for number in range(total)]})
    mine = range(context.ranks.rank, total, context.ranks.world_size)
    found: list[tuple[int, Rows, Rows]] = []
    calls: Rows = []
    for done, number in enumerate(mine):
        context.progress("scoring", done, len(mine))
        names = f"scores/{number:05d}.json", f"{RECORDS}answers/{number:05d}.json"
        check = holds(names, [row["sample_id"] for row in read_rows(samples, number)])
        if not context.attempt.adopt(number, check):
            made = _score(reward, list(read_unit(samples, number, part)), config, calls)
            files = {name: canonical_json(table) for name, table in zip(names, made, strict=True)}
            context.attempt.finish(number, files, check, offered=_all_scored(made[1]))
        found.append((number, *(json.loads(context.attempt.read(name)) for name in names)))
    context.progress("scoring", len(mine), len(mine))
    units = sorted((unit for some in context.ranks.gather(found) for unit in some), key=lambda unit: unit[0])
    table = pd.DataFrame([row for _, rows, _ in units for row in rows])
    answers = [row for _, _, rows in units for row in rows]
    calls = [row for some in context.ranks.gather(calls) for row in some]
    _refuse_too_many(answers, config)
    if context.ranks.rank == 0:
        context.attempt.put(contracts.Reward.SCORES, to_parquet(table))
        context.attempt.put(contracts.Reward.ANSWERS, to_parquet(pd.DataFrame(answers)))
        context.attempt.put(contracts.Reward.CALLS, to_parquet(pd.DataFrame(calls, columns=_CALL)))
    scores = table.loc[table["valid"], "score"].astype("float64")
    error = float(scores.sem()) if len(scores) > 1 else None
    failed = {"failed": len(table) - len(scores)} if len(scores) < len(table) else {}
    counts = {"standard_error": error, "scored": len(scores)} | failed
    return {config.reward.label: float(scores.mean())} | counts


def _sample(stored: StoredSample) -> Sample | LatentSample:
    """Return the sample for a reward. Raises :class:`ArtifactError` if its bytes cannot be decoded: that is damage."""
    row = stored.row
    try:
        latents = stored.final_latents
        kind, data = (Sample, stored.pixels) if latents is None else (LatentSample, latents)
    except Exception as error:  # decoders raise whatever they like
        what = f"sample {stored.sample_id}: its {stored.extension or 'latents'}"
        raise ArtifactError(f"{what} cannot be decoded: {error}") from error
    return kind(row["sample_id"], row["prompt_id"], row["prompt"], data, metadata=row["metadata"])


def _score(reward: Reward, stored: list[StoredSample], config: contracts.Reward, calls: Rows) -> tuple[Rows, Rows]:
    """Return the score rows of one unit, and the answers that they come from.

    Failed samples are tried again together, up to ``max_attempts`` times in all. The reward never gets a sample that is
    not finite.
    """
    label = config.reward.label
    results: dict[str, Outcome] = {s.sample_id: _NOT_FINITE for s in stored if not s.finite}
    waiting = [_sample(one) for one in stored if one.finite]
    for attempt in range(config.max_attempts if waiting else 0):
        started_s = time.monotonic()
        outcomes = _outcomes(reward, waiting, label)
        results |= zip((sample.sample_id for sample in waiting), outcomes, strict=True)
        failed = [s for s in waiting if isinstance(results[s.sample_id], Exception)]
        call = len(waiting), attempt, len(failed), time.monotonic() - started_s
        calls.append(dict(zip(_CALL, call, strict=True)))
        waiting = failed
        if not waiting:
            break
    rows: Rows = []
    answers: Rows = []
    for one in stored:
        outcome = results[one.sample_id]
        score, error, details = None, "", "{}"
        if isinstance(outcome, Exception):
            error = words(outcome)
        else:
            score, details = float(outcome[label]), json.dumps(outcome, sort_keys=True)
        sample = {"sample_id": one.sample_id, "prompt_id": one.row["prompt_id"]}
        rows.append(sample | {"score": score, "valid": score is not None, "scorer": config.scorer})
        answers.append({"sample_id": one.sample_id, "error": error, "details": details})
    return rows, answers


def _outcomes(reward: Reward, samples: list[Any], label: str) -> list[Outcome]:
    """Return scores or a failure for each sample. If scoring them together fails, each is scored alone.

    Raises errors that are no sample's fault: :class:`UnavailableError`, a lost connection or a timeout, because the
    scorer is away, :class:`ConfigError`, because it would fail all samples, and a lack of memory.
    """
    try:
        found = [scored(entry, label) for entry in entries(reward.score([*samples]), len(samples))]
    except _PASSING:
        raise
    except Exception as error:
        # No sample is at fault, and each alone needs as much memory as all together.
        if is_out_of_memory(error):
            raise
        if len(samples) == 1:
            return [error]
        return [outcome for sample in samples for outcome in _outcomes(reward, [sample], label)]
    for outcome in found:
        if isinstance(outcome, _AWAY):
            raise outcome
    return found


def _all_scored(answers: Rows) -> bool:
    """Return whether another attempt may adopt the unit: a sample that failed now may be scored then.

    Samples that are not finite never can be.
    """
    return all(answer["error"] in ("", words(_NOT_FINITE)) for answer in answers)


def _refuse_too_many(answers: Rows, config: contracts.Reward) -> None:
    failed = [answer for answer in answers if answer["error"]]
    lost = [answer for answer in failed if answer["error"] == words(_NOT_FINITE)]
    total, allowed, label = len(answers), config.max_failed_fraction, config.reward.label
    for kind, some, what in (
        (DivergenceError, lost, f"{len(lost)} of {total} samples are not finite"),
        (RewardError, failed, f"{label} could not score {len(failed)} of {total} samples"),
    ):
        if len(some) > allowed * total:
            shown = "; ".join(f"{answer['sample_id']} ({answer['error']})" for answer in some[:10])
            dots = " ..." if len(some) > 10 else ""
            raise kind(f"{what}, more than max_failed_fraction = {allowed}: {shown}{dots}")
