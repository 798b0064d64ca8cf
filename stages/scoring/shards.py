"""Scores of portions that were made while their rollout was still being made.

They lie in the slot of the reward, sealed, and are no part of any artifact. The name of each shard is a digest of
everything that decides the scores: the reward and its settings, the scorer of a service, the packages, and the bytes of
the samples. So only time is lost if a shard is missing, damaged, or of samples that the rollout did not keep.
"""

from functools import cached_property
from typing import Any

from cosmos_rl_core.canonical import digest
from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.storage import store
from stages.artifacts.records import Record, place_of
from stages.artifacts.request import Request
from stages.contracts import INDEX
from stages.formats.samples import unit_name
from stages.scoring.portions import Portion
from stages.scoring.scorer import Made, Rows, Scorer

AHEAD = "ahead"
"""Folder of the slot that has the shards."""


class Shard(Record):
    """The scores of one portion."""

    kind = "ahead"
    portion: str
    """Digest of everything that decides the scores."""
    scores: Rows
    answers: Rows
    calls: Rows


class Shards:
    """The shards of one generation of a reward's slot. ``made_by`` has facts of the scorer that the Request lacks."""

    def __init__(
        self, request: Request, scorer: Scorer, generation: int, numerics: dict[str, Any], made_by: dict[str, str]
    ) -> None:
        self._slot, self._generation, self._samples = request.slot, generation, scorer.samples
        self._parts, self._name = (INDEX, scorer.part), scorer.name
        self._decides = {"recipe": request.recipe, "numerics": numerics, "made_by": made_by}

    @cached_property
    def names(self) -> set[str]:
        """Return the names of the files that were there at the first call, also of other generations and samples."""
        return store.names(store.join(self._slot, AHEAD))

    def name(self, portion: Portion) -> str:
        """Return the name of a portion's file."""
        return f"{self._digest(portion)[:32]}.json"

    def read(self, portion: Portion) -> Made | None:
        """Return the scores of a portion; None if there are none.

        Raises :class:`ArtifactError` if the file is damaged, or has the scores of other samples or another scorer.
        """
        url = self._url(portion)
        data = store.read_if_exists(url)
        if data is None:
            return None
        found = Shard.unsealed(data, url, self._slot, self._generation)
        named = [[row["sample_id"] for row in rows] for rows in (found.scores, found.answers)]
        scorers = {row["scorer"] for row in found.scores}
        if found.portion != self._digest(portion) or named != [portion.ids] * 2 or scorers != {self._name}:
            raise ArtifactError(f"{url} has the scores of other samples")
        return Made(found.scores, found.answers, found.calls)

    def write(self, portion: Portion, made: Made) -> None:
        """Write the scores of a portion, unless a sample failed that another attempt could score."""
        if not made.all_scored:
            return
        record = Shard(
            place=place_of(self._slot),
            generation=self._generation,
            portion=self._digest(portion),
            **made._asdict(),
        )
        store.write(self._url(portion), record.sealed())

    def remove(self, portion: Portion) -> None:
        """Delete the file of a portion, whose scores are kept elsewhere."""
        store.remove(self._url(portion))

    def _url(self, portion: Portion) -> str:
        return store.join(self._slot, AHEAD, self.name(portion))

    def _digest(self, portion: Portion) -> str:
        files = [[self._samples.entry(unit_name(part, n)).sha256 for part in self._parts] for n in portion.units]
        return digest(self._decides | {"samples": portion.ids, "files": files})
