"""A window of requests to a service: the most that it has at a time, from all threads together."""

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

from cosmos_rl_core.errors import UnavailableError

Answer = TypeVar("Answer")
Request = Generator[None, None, Answer]
"""A request as a generator: it yields once, when its body is made. The next step sends it and returns its answer."""


class Window:
    """A queue of requests from any threads, sent in order. The service has at most ``size`` of them at a time.

    One thread makes the bodies, and the next body is ready while the service has ``size`` requests. Each request is
    sent, and its answer awaited, in a thread of its own, so that a slow request does not delay others.
    """

    def __init__(self, size: int) -> None:
        self._places = threading.Semaphore(size)
        self._making = ThreadPoolExecutor(1, "frame")
        self._asking = ThreadPoolExecutor(size, "request")
        self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        # The thread that makes bodies may wait for a place.
        self._places.release()
        # After an error there is no wait for answers, which may take until the deadline of their requests.
        for threads in (self._making, self._asking):
            threads.shutdown(wait=error[0] is None)

    def ask(self, request: Request[Answer]) -> Future[Future[Answer]]:
        """Send a request in its turn. The future ends when the request is sent; its result is the answer's future."""
        return self._making.submit(self._begin, request)

    def _begin(self, request: Request[Answer]) -> Future[Answer]:
        self._refuse_if_ended()
        next(request)
        self._places.acquire()
        self._refuse_if_ended()
        return self._asking.submit(self._answer, request)

    def _answer(self, request: Request[Answer]) -> Answer:
        try:
            next(request)
        except StopIteration as end:
            return end.value
        finally:
            self._places.release()
        raise RuntimeError("a request yields more than once")

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise UnavailableError("another request ended the scoring")
