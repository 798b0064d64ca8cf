"""Portions that several processes score side by side, each with a reward of its own and without torch."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.errors import CosmosRLError, UnavailableError
from cosmos_rl_core.foreign_errors import is_out_of_memory
from cosmos_rl_core.processes import die_with_parent
from cosmos_rl_core.rewards._base.answers import words
from cosmos_rl_core.rewards._base.served import ServedScorer
from stages.artifacts.request import Request
from stages.scoring.portions import Portion
from stages.scoring.scorer import Made, Scorer

_SCORERS: list[Scorer] = []
"""The scorer of this process, if it is one of several."""


def side_by_side(
    scorer: Scorer, request: Request, portions: list[Portion], count: int, served: ServedScorer | None
) -> Iterator[tuple[Portion, Made]]:
    """Yield each portion with its scores, as soon as it has them, scored by ``count`` processes.

    One process is this one. Only this process writes, so that what it kept when it was killed is what counts.
    """
    count = min(count, len(portions))
    if count <= 1:
        yield from ((portion, scorer.score(portion)) for portion in portions)
        return
    # Spawned, because a fork would copy the threads' locks of whatever the reward has loaded.
    begin = request.model_dump_json().encode()
    with ProcessPoolExecutor(count, get_context("spawn"), _begin, (begin, served)) as pool:
        try:
            futures = {pool.submit(_score, portion): portion for portion in portions}
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(request: bytes, served: ServedScorer | None) -> None:
    die_with_parent()
    outside_plugins.use(outside_plugins.named_in(request), verify=True)
    _SCORERS.append(Scorer(Request.model_validate_json(request)))
    _SCORERS[0].hold_to(served)


def _score(portion: Portion) -> Made:
    try:
        return _SCORERS[0].score(portion)
    except Exception as error:
        raise _portable(error) from None


def _portable(error: Exception) -> Exception:
    """Return an error of the same kind that another process can read: our own as they are, others as words."""
    if isinstance(error, CosmosRLError):
        return error
    if is_out_of_memory(error):
        return MemoryError(words(error))
    return (UnavailableError if isinstance(error, ConnectionError | TimeoutError) else RuntimeError)(words(error))
