"""Scoring of portions side by side: by several processes without torch, or by a service that takes several."""

import threading
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from itertools import zip_longest
from multiprocessing import get_context
from queue import SimpleQueue

from cosmos_rl_core import outside_plugins
from cosmos_rl_core.errors import CosmosRLError, UnavailableError
from cosmos_rl_core.foreign_errors import is_out_of_memory
from cosmos_rl_core.processes import TRAFFIC, die_with_parent
from cosmos_rl_core.rewards._base import WindowReward
from cosmos_rl_core.rewards._base.answers import words
from cosmos_rl_core.rewards._base.served import ServedScorer
from stages.artifacts.request import Request
from stages.scoring.portions import Portion
from stages.scoring.scorer import Made, Scorer

UNSENT = 2
"""Most portions that are not sent to a service as a whole: while one is sent, the next one is read and decoded."""
_SCORERS: list[Scorer] = []
"""The scorer of this process, if it is one of several."""


def side_by_side(
    scorer: Scorer, request: Request, portions: list[Portion], count: int, served: ServedScorer | None
) -> Generator[tuple[Portion, Made]]:
    """Yield each portion with its scores, as soon as it has them, scored by ``count`` processes.

    If ``count`` is 1, this process scores, and reads and decodes the next portion meanwhile, so that a device does not
    wait between two portions. Only this process writes files, so after a kill the files that it wrote are all that
    counts. For a service with windows of requests, this process opens ``count`` windows.
    """
    if isinstance(scorer.reward, WindowReward) and portions:
        yield from through_windows(scorer, scorer.reward, portions, count)
        return
    count = min(count, len(portions))
    if count <= 1:
        yield from _one_after_the_other(scorer, portions)
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


def _one_after_the_other(scorer: Scorer, portions: list[Portion]) -> Generator[tuple[Portion, Made]]:
    with ThreadPoolExecutor(1, "read") as thread:
        coming = None
        for portion, later in zip_longest(portions, portions[1:]):
            read = scorer.ahead(portion) if coming is None else coming.result()
            coming = None if later is None else thread.submit(scorer.ahead, later)
            yield portion, scorer.score(portion, read=read)


def through_windows(
    scorer: Scorer, reward: WindowReward, portions: list[Portion], count: int = 1
) -> Generator[tuple[Portion, Made]]:
    """Yield each portion with its scores, as soon as it has them.

    A portion begins when fewer than :data:`UNSENT` others are not yet sent as a whole. So the service never waits for
    samples between two portions, and memory holds the samples of its requests and of :data:`UNSENT` portions.
    """
    left, turn, ended = iter(portions), threading.Lock(), SimpleQueue[Future[tuple[Portion, Made]]]()
    threads = ThreadPoolExecutor(len(portions), "portion")

    def begin() -> None:
        with turn:
            portion = next(left, None)
            if portion is not None:
                threads.submit(score, portion).add_done_callback(ended.put)

    def score(portion: Portion) -> tuple[Portion, Made]:
        is_first = iter([True])

        def sent() -> None:
            # Called again if a sample is sent again, and once for a portion with nothing to send: only the first call
            # counts.
            if next(is_first, False):
                begin()

        made = scorer.score(portion, lambda samples: ask(samples, sent))
        sent()
        return portion, made

    try:
        with reward.window(count) as ask:
            for _ in range(UNSENT):
                begin()
            for _ in portions:
                with TRAFFIC.waiting():
                    future = ended.get()
                yield future.result()
    finally:
        # After an error the threads end when their requests do.
        threads.shutdown(wait=False)


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
    """Return an error of the same kind that another process can unpickle: our own as they are, others as text."""
    if isinstance(error, CosmosRLError):
        return error
    if is_out_of_memory(error):
        return MemoryError(words(error))
    return (UnavailableError if isinstance(error, ConnectionError | TimeoutError) else RuntimeError)(words(error))
