"""The media that the last part of a dataset adds, as clips of one size, or each of the nearest of several sizes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

import numpy as np
import pandas as pd

from cosmos_rl_core.config.train import DatasetOptions
from cosmos_rl_core.datasets import _clips, _sources
from cosmos_rl_core.datasets._base import ItemError, Source
from cosmos_rl_core.datasets._windows import Windows
from cosmos_rl_core.errors import DatasetError
from cosmos_rl_core.pipelines.buckets import Size, nearest
from stages.artifacts.artifact import Artifact
from stages.execution.context import Context, Ranks
from stages.formats.latents import SIZE
from stages.formats.parts import Parts

AGAIN = "bring the dataset up to date: cosmos-flows preprocess"


class PartMedia:
    """Clips of the media of a part, each named by the digest of its medium and the number of its window.

    If there are ``later`` parts, only media that are left after them count, under the file names that they have then.
    """

    def __init__(
        self,
        parts: Parts,
        sources: Mapping[str, DatasetOptions],
        windows: Windows,
        sizes: tuple[Size, ...],
        later: Sequence[Artifact] = (),
    ) -> None:
        self._unlisted = {name: _sources.source_of(options) for name, options in sources.items()}
        self._windows, self._sizes = windows, sizes
        rows = parts.added("medium")
        if later:
            there = Parts([*parts.artifacts, *later]).items
            rows = there[there["medium"].isin(rows["medium"])].drop_duplicates("medium").sort_values("medium")
        self._rows = {row["medium"]: row for row in rows.to_dict("records")}
        places = [(medium, window) for medium in self._rows for window in range(windows.clips)]
        self._places = {_name(medium, window, windows.clips): (medium, window) for medium, window in places}

    @property
    def ids(self) -> list[str]:
        """Return the names of the clips."""
        return list(self._places)

    def check(self, context: Context[Ranks], ids: Sequence[str]) -> None:
        """Do nothing: the media were checked when they were indexed."""

    def table(self, layout: Sequence[Sequence[str]]) -> pd.DataFrame:
        """Return one row per clip: ``latents_id``, ``medium``, number of its ``shard``; its size if sizes differ."""
        rows = [(one, self._places[one][0], number) for number, ids in enumerate(layout) for one in ids]
        table = pd.DataFrame(rows, columns=["latents_id", "medium", "shard"])
        if len(self._sizes) == 1:
            return table
        found = pd.DataFrame([self._size_of(row[1]) for row in rows], columns=[*SIZE], dtype="int64")
        return table.join(found)

    def pixels(self, ids: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        """Yield clips, uint8 RGB ``[frames, height, width, 3]``, decoding each medium once.

        Raises :class:`DatasetError` if a file has gone, is not the one that was indexed, or cannot be decoded.
        """
        for medium, group in groupby(ids, key=lambda one: self._places[one][0]):
            names = list(group)
            clips = self._read(medium, [self._places[one][1] for one in names])
            yield from zip(names, clips, strict=True)

    @cached_property
    def _sources(self) -> dict[str, Source]:
        """Return the sources after a listing: a source opens only files that it has listed."""
        _sources.stamps(self._unlisted)
        return self._unlisted

    def _size_of(self, medium: str) -> Size:
        row = self._rows[medium]
        return nearest(self._sizes, (int(row["height"]), int(row["width"])))

    def _read(self, medium: str, windows: list[int]) -> list[np.ndarray]:
        row = self._rows[medium]
        try:
            wanted = self._windows.indices(row["frames"], row["fps"])
            with _sources.opened(self._sources, row["unit"], row["name"], medium) as copy:
                return _clips.read(copy, row["kind"], [wanted[window] for window in windows], self._size_of(medium))
        except ItemError as error:
            raise DatasetError(f"{row['unit']}: {error}; mend or remove the file, and {AGAIN}") from error


def _name(medium: str, window: int, windows: int) -> str:
    return medium if windows == 1 else f"{medium}-{window:02d}"
