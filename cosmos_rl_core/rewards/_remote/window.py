"""A window of requests to a service: it always has so many of them, while there are some, whoever asks."""

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

from cosmos_rl_core.errors import UnavailableError

Answer = TypeVar("Answer")
Request = Generator[None, None, Answer]
"""A request: it yields once, when its body is made; then it is sent, and it returns its answer."""


class Window:
    """At most ``size`` requests that a service has at a time, of all threads that ask, in the order of their asking.

    One thread makes their bodies: while the service has as many requests as it may, the next one is ready. Each of them
    is sent, and its answer waited for, in a thread of its own, so that a slow one keeps no other.
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
        # After an error nothing is waited for: an answer may take as long as the deadline of its request.
        for threads in (self._making, self._asking):
            threads.shutdown(wait=error[0] is None)

    def ask(self, request: Request[Answer]) -> Future[Future[Answer]]:
        """Send a request in its turn. The first result, when it goes out, is the future of its answer."""
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
