"""Samples of a rollout whose pictures, or some of them, lie in artifacts of the stage ``decode``."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from stages.artifacts.artifact import Artifact
from stages.contracts import MEDIA
from stages.formats.samples import Files, StoredSample, all_rows, has_media, read_rows, read_unit

_UNITS_HELD = 2
"""Most units of decoded pictures in memory."""


class Decoded:
    """The units of a rollout, with pictures that were decoded later.

    ``parts`` are the parts of the rollout that are read; without ``media`` every picture was decoded later.
    """

    def __init__(self, samples: Files, parts: Sequence[str], decoded: Sequence[Artifact]) -> None:
        self._samples, self._own = samples, MEDIA in parts
        self._decoded = decoded
        self._where = {row["sample_id"]: (n, row["unit"]) for n, one in enumerate(decoded) for row in all_rows(one)}
        self._unit = lru_cache(_UNITS_HELD)(self._read)

    def read_unit(self, number: int) -> Iterator[StoredSample]:
        """Read one unit's samples with their pictures, in the order of generation."""
        rows = read_rows(self._samples, number)
        # The rollout's file of pictures is worth reading only if the rollout decoded a sample of the unit.
        own = self._own and any(has_media(row) for row in rows)
        for one in read_unit(self._samples, number) if own else map(StoredSample, rows):
            where = self._where.get(one.sample_id)
            yield one if where is None else self._unit(*where)[one.sample_id]

    def _read(self, which: int, unit: int) -> dict[str, StoredSample]:
        return {one.sample_id: one for one in read_unit(self._decoded[which], unit)}
