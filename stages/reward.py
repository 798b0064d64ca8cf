"""Scores of generated samples. A sample that cannot be scored is excluded and counted; it never gets a number."""

import json
from dataclasses import asdict
from itertools import chain
from typing import Any

import pandas as pd

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.errors import ArtifactError, DivergenceError, RewardError
from cosmos_rl_core.estimates.estimate import mean_of
from cosmos_rl_core.rewards._base import NamedReward, WindowReward
from cosmos_rl_core.rewards._base.answers import finite
from cosmos_rl_core.rewards._base.served import ServedScorer
from cosmos_rl_core.rewards._batches.exact import ONE_BY_ONE
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import Check, holds
from stages.artifacts.request import Request
from stages.contracts import RECORDS
from stages.execution.context import Context, Ranks
from stages.formats.samples import all_rows
from stages.formats.tables import to_parquet
from stages.scoring.pinned import settle
from stages.scoring.portions import Portion, portions_of
from stages.scoring.processes import side_by_side
from stages.scoring.scorer import CALL, LOST, REFUSED, Made, Rows, Scorer
from stages.scoring.shards import Shards

PORTIONS_IN_WINDOWS = 8
"""Portions that a worker takes at once if its reward keeps a window of requests open across portions."""


def run(request: Request, context: Context[Ranks]) -> dict[str, Any]:
    """Write ``scores.parquet``: ``sample_id, prompt_id, score, valid, scorer``.

    The records are ``answers.parquet`` (``sample_id, error, details``) and ``calls.parquet`` (one row per call). Raises
    :class:`RewardError`, naming the samples, if more than ``max_failed_fraction`` of them failed or none has a score,
    and :class:`DivergenceError` if more than that share are not finite.
    """
    samples = Artifact(request.one("samples"))
    scorer = Scorer(request, samples)
    config = scorer.config
    portions = portions_of(all_rows(samples), scorer.part, groupwise=scorer.groupwise)
    served = _served(scorer, context)
    alone = scorer.make_exact(context.ranks.gather, context.outcome.note)
    # Scores of another scorer of the service, or of other batches, are not adopted.
    made_by = ({"served": served.digest} if served else {}) | ({"batches": ONE_BY_ONE} if alone else {})
    ahead_by = dict(made_by)
    # The calls of all workers are reported, so they are stored with the scores.
    made_by |= {"calls": "stored"} if context.handed else {}
    context.layout(portions.layout, **made_by)
    ahead = Shards(request, scorer, context.attempt.generation, context.attempt.numerics, ahead_by)
    calls: Rows = []
    at_once = PORTIONS_IN_WINDOWS if isinstance(scorer.reward, WindowReward) else 1
    for together in context.hands(len(portions.all), at_once=at_once):
        some = [portions.all[n] for n in together[context.ranks.rank :: context.ranks.world_size]]
        calls += _score(some, scorer, request, context, served, ahead)
    mine = [portions.all[n] for n in context.own(len(portions.all))]
    found = [[json.loads(context.attempt.read(name)) for name in _names(portion, context)] for portion in mine]
    rows, answers, stored = ([row for unit in found for row in chain(*unit[table : table + 1])] for table in range(3))
    calls = stored if context.handed else calls

    def gathered(rows: Rows) -> Rows:
        everyone = (row for some in context.ranks.gather(rows) for row in some)
        return sorted(everyone, key=lambda row: portions.order[row["sample_id"]])

    table, answers = pd.DataFrame(gathered(rows)), gathered(answers)
    calls = [row for some in context.ranks.gather(calls) for row in some]
    _refuse_too_many(answers, config)
    if context.ranks.rank == 0:
        context.attempt.put(contracts.Reward.SCORES, to_parquet(table))
        context.attempt.put(contracts.Reward.ANSWERS, to_parquet(pd.DataFrame(answers)))
        context.attempt.put(contracts.Reward.CALLS, to_parquet(pd.DataFrame(calls, columns=CALL)))
    scores = table.loc[table["valid"], "score"].astype("float64")
    # Samples of a prompt are correlated, so errors are taken over prompts. Version 1 took samples as independent.
    error = finite(mean_of(scores, table.loc[table["valid"], "prompt_id"]).error)
    failed = {"failed": len(table) - len(scores)} if len(scores) < len(table) else {}
    counts = {"standard_error": error, "scored": len(scores)} | failed
    return {config.reward.label: float(scores.mean())} | counts


def _names(portion: Portion, context: Context[Ranks]) -> list[str]:
    """Return the names of a portion's scores and answers, and of its calls if workers make the portions."""
    folders = ["scores", f"{RECORDS}answers", *([f"{RECORDS}calls"] if context.handed else [])]
    return [f"{folder}/{portion.number:05d}.json" for folder in folders]


def _served(scorer: Scorer, context: Context[Ranks]) -> ServedScorer | None:
    """Return the service's scorer that the run keeps to; None without a service, or if it names no scorer."""
    if not isinstance(scorer.reward, NamedReward):
        return None
    how, label, served = context.execution, scorer.config.reward.label, None
    if context.ranks.rank == 0:
        accept, note = how.accept_scorer, context.outcome.note
        served = settle(scorer.reward, label, how.scorer_record, accept=accept, note=note)
    told = context.ranks.broadcast(asdict(served) if served else None)
    served = ServedScorer(**told) if told else None
    scorer.hold_to(served)
    return served


def _score(
    mine: list[Portion],
    scorer: Scorer,
    request: Request,
    context: Context[Ranks],
    served: ServedScorer | None,
    ahead: Shards,
) -> Rows:
    """Adopt portions that an earlier attempt finished, take portions that were scored while the samples were made,
    score the others, and return one row per call.
    """
    checks = {portion.number: _holds(portion, context) for portion in mine}
    waiting = [one for one in mine if not context.attempt.adopt(one.number, checks[one.number])]
    done, calls = len(mine) - len(waiting), dict[int, Rows]()
    context.progress("scoring", done, len(mine))
    early = _scored_ahead(waiting, ahead, context)
    rest = [portion for portion in waiting if portion.number not in early]
    scored = side_by_side(scorer, request, rest, context.execution.processes, served)
    for portion, made in chain(early.values(), scored):
        tables = zip(_names(portion, context), (made.scores, made.answers, made.calls), strict=False)
        files = {name: canonical_json(table) for name, table in tables}
        # A service may give other scores the next time; the first ones count.
        repeatable = not isinstance(scorer.reward, NamedReward | WindowReward)
        check, offered = checks[portion.number], made.all_scored
        context.attempt.finish(portion.number, files, check, offered=offered, repeatable=repeatable)
        if portion.number in early:
            ahead.remove(portion)
        calls[portion.number] = made.calls
        done += 1
        context.progress("scoring", done, len(mine))
    return [row for _, rows in sorted(calls.items()) for row in rows]


def _holds(portion: Portion, context: Context[Ranks]) -> Check:
    """Check that the files of a portion hold its samples. Calls are not checked: one may be of any samples."""
    scores, answers, *_ = _names(portion, context)
    check = holds([scores, answers], portion.ids)
    return lambda files: check({name: data for name, data in files.items() if "/calls/" not in name})


def _scored_ahead(waiting: list[Portion], ahead: Shards, context: Context[Ranks]) -> dict[int, tuple[Portion, Made]]:
    """Return the portions that were scored while the samples were made, by number. Damaged scores are left out."""
    found: dict[int, tuple[Portion, Made]] = {}
    there = ahead.names
    # A portion whose media were deleted has no name, so no name is asked for where nothing was scored ahead.
    for portion in waiting if there else ():
        if ahead.name(portion) not in there:
            continue
        try:
            made = ahead.read(portion)
        except ArtifactError as error:
            context.outcome.note(f"scored again: {error}")
            continue
        found |= {portion.number: (portion, made)} if made is not None else {}
    if found:
        context.outcome.note(f"{len(found)} of {len(waiting)} shards were scored while the rollout ran")
    return found


def _refuse_too_many(answers: Rows, config: contracts.Reward) -> None:
    failed = [answer for answer in answers if answer["error"] and not answer["error"].endswith(REFUSED)]
    lost = [answer for answer in failed if answer["error"].endswith(LOST)]
    total, allowed, label = len(answers), config.max_failed_fraction, config.reward.label
    unscored, above = f"{label} could not score {len(failed)} of {total} samples", f"max_failed_fraction = {allowed}"
    if len(lost) > allowed * total:
        raise DivergenceError(f"{len(lost)} of {total} samples are not finite, more than {above}: {_shown(lost)}")
    if len(failed) > allowed * total:
        raise RewardError(f"{unscored}, more than {above}: {_shown(failed)}")
    # The others may be samples that a guardrail refused.
    if failed and all(answer["error"] for answer in answers):
        raise RewardError(f"{unscored}, and none has a score: {_shown(failed)}")


def _shown(answers: Rows) -> str:
    shown = "; ".join(f"{answer['sample_id']} ({answer['error']})" for answer in answers[:10])
    return f"{shown} ..." if len(answers) > 10 else shown
