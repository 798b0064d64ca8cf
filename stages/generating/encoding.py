"""Encoding and writing of generated samples by threads, while the process that made them generates the next ones.

A PNG of 512 pixels takes 88 ms, and a frame of FFV1 at 720p 57 ms: if the sampling thread did this, the GPU would wait.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np

from cosmos_rl_core.processes import TRAFFIC
from cosmos_rl_core.storage import media
from stages.formats.samples import BY_GUARDRAIL, DECODED, REFUSED, StoredSample
from stages.generating.plans import ENCODERS, TILES_AHEAD, SamplePlan, row_of

UNITS_AHEAD = 2
"""Most units that wait to be encoded or written when the next one is taken."""

Encoding = Callable[[], StoredSample]
"""Function that makes the stored form of a sample from pixels in memory. It may run in any thread."""


def with_media(
    plan: SamplePlan, pixels: np.ndarray | None, tensors: bytes | None, facts: dict[str, Any], *, refused: bool = False
) -> StoredSample:
    """Return a generated sample with its picture encoded.

    ``pixels`` is uint8 ``[frames, height, width, 3]``, None if the sample is not finite or ``refused`` by a guardrail.
    ``facts`` are added to its row of the index.
    """
    assert not (refused and pixels is not None), "no media of a refused sample are stored"
    return encoded(row_of(plan) | ({REFUSED: BY_GUARDRAIL} if refused else {}) | facts, pixels, tensors)


def encoded(row: dict[str, Any], pixels: np.ndarray | None, tensors: bytes | None = None) -> StoredSample:
    """Return a sample with its picture encoded. ``row`` is its row of the index, to which ``finite`` is added."""
    media_of = ("", b"") if pixels is None else media.encode(pixels)
    return StoredSample(row | {"finite": pixels is not None}, *media_of, tensors=tensors)


def without_media(plan: SamplePlan, tensors: bytes, facts: dict[str, Any], *, is_finite: bool) -> StoredSample:
    """Return a generated sample whose latents are not decoded."""
    undecoded = {DECODED: False} if is_finite else {}
    return StoredSample(row_of(plan) | {"finite": is_finite} | undecoded | facts, tensors=tensors)


class UnitWriter:
    """Threads that encode the samples of units, and write each unit when its last sample is encoded, one at a time.

    Memory holds the pixels of at most :data:`TILES_AHEAD` tiles, besides tiles that the caller makes, and the encoded
    samples of :data:`UNITS_AHEAD` units and one more. An error of a thread is raised by a later call. Use it in a
    ``with`` block, whose end waits until everything is written.
    """

    def __init__(self, sizes: Mapping[int, int], write: Callable[[int, list[StoredSample]], None]) -> None:
        """Start the threads. ``sizes`` are the numbers of samples of units; one thread calls ``write`` for each."""
        self._sizes, self._write = sizes, write
        self._encoders, self._writer = ThreadPoolExecutor(ENCODERS, "encode"), ThreadPoolExecutor(1, "write")
        self._tiles: deque[list[Future[StoredSample]]] = deque()
        self._begun: dict[int, list[Future[StoredSample]]] = {}
        self._writing: deque[Future[None]] = deque()

    def take(self, number: int, encodings: Sequence[Encoding]) -> None:
        """Encode the next samples of a unit in the background. Wait while too many tiles are not encoded yet."""
        tile = [self._encoders.submit(encode) for encode in encodings]
        self._tiles.append(tile)
        unit = self._begun.setdefault(number, [])
        unit += tile
        if len(unit) == self._sizes[number]:
            self._writing.append(self._writer.submit(self._finish, number, self._begun.pop(number)))
        with TRAFFIC.waiting():
            while len(self._tiles) > TILES_AHEAD:
                for sample in self._tiles.popleft():
                    sample.result()
            self._wait_for_writer(UNITS_AHEAD)

    def _finish(self, number: int, samples: list[Future[StoredSample]]) -> None:
        self._write(number, [sample.result() for sample in samples])

    def _wait_for_writer(self, most: int) -> None:
        """Wait until at most ``most`` units are not written yet."""
        while len(self._writing) > most:
            self._writing.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with TRAFFIC.waiting():
                    self._wait_for_writer(0)
        finally:
            self._encoders.shutdown(cancel_futures=error is not None)
            self._writer.shutdown(cancel_futures=error is not None)
