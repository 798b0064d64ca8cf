"""Preparation of samples in a thread, while the model works on earlier samples.

To scale a sample's pictures and cut them into patches takes the CPU about as long as a language model's answer takes a
GPU. Order and contents do not change, so scores have the same bits.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.rewards._base import Sample

Made = TypeVar("Made")
Found = TypeVar("Found")

AHEAD = 2
"""Largest number of prepared samples that wait for the model."""


class Prepared(Generic[Made]):
    """The next few of the expected samples, prepared in order.

    ``prepare`` runs in a thread of its own, which ends when no more samples are expected. It must not load a model.
    """

    def __init__(self, prepare: Callable[[Sample], Made]) -> None:
        self._prepare = prepare
        self._expected: deque[Sample] = deque()
        self._coming: deque[tuple[Sample, Future[Made]]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._turn = threading.Lock()

    def expect(self, samples: Sequence[Sample]) -> None:
        """Add samples to the end of the expected ones. :meth:`each` gets them in this order. Any thread may call it."""
        with self._turn:
            self._expected.extend(samples)
            if self._thread is not None:
                self._begin(self._thread)

    def each(self, samples: Sequence[Sample], score: Callable[[Sample, Made], Found]) -> list[Found | Exception]:
        """Return the score of each sample, in order, or the ``ItemError`` or ``ValueError`` that says why it has none.

        ``score`` gets a sample and the result of ``prepare``.
        """
        with self._turn:
            if not self._coming and not self._expected:
                self._expected.extend(samples)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "prepare")
            self._begin(self._thread)

        def one(sample: Sample) -> Found | Exception:
            try:
                coming = self._next(sample)
                return score(sample, self._prepare(sample) if coming is None else coming.result())
            except (ItemError, ValueError) as error:
                return error

        try:
            return [one(sample) for sample in samples]
        finally:
            self._end(samples)

    def _begin(self, thread: ThreadPoolExecutor) -> None:
        while self._expected and len(self._coming) < AHEAD:
            sample = self._expected.popleft()
            self._coming.append((sample, thread.submit(self._prepare, sample)))

    def _next(self, sample: Sample) -> Future[Made] | None:
        """Return this sample's preparation if it is the next expected one, and begin another; else None."""
        with self._turn:
            if self._thread is None or not self._coming or self._coming[0][0] is not sample:
                return None
            _, future = self._coming.popleft()
            self._begin(self._thread)
            return future

    def _end(self, samples: Sequence[Sample]) -> None:
        """Forget ``samples``, which an error may have left; end the thread unless other samples are expected."""
        left = {id(sample) for sample in samples}
        with self._turn:
            self._coming = deque((one, made) for one, made in self._coming if id(one) not in left)
            self._expected = deque(one for one in self._expected if id(one) not in left)
            if self._thread is not None and not self._coming and not self._expected:
                self._thread.shutdown()
                self._thread = None
