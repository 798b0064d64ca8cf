"""Generated samples with their scores, as pages show them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.formats.samples import StoredSample, all_rows, read_index, read_unit
from stages.formats.tables import read_table


@dataclass(frozen=True)
class Samples:
    """Generated samples with their scores."""

    artifact: Artifact
    scores: Artifact | None
    table: Any
    """The index of the samples with the columns ``score``, ``valid``, ``error`` and ``failed``, by sample id."""

    @classmethod
    def read(cls, source: Input, scores: Input | None) -> "Samples":
        """Read the index and the scores; a sample that is not valid has no score."""
        artifact, scored = Artifact(source), None if scores is None else Artifact(scores)
        table = read_index(artifact).set_index("sample_id")
        found = pd.DataFrame(columns=["sample_id", "score", "valid", "error"])
        if scored is not None:
            answers = read_table(scored, contracts.Reward.ANSWERS)
            found = read_table(scored, contracts.Reward.SCORES).merge(answers, on="sample_id", how="left")
        found = found.set_index("sample_id").reindex(table.index)
        table["valid"] = found["valid"].eq(True)
        table["failed"] = found["valid"].eq(False)
        table["score"] = found["score"].astype("float64").where(table["valid"])
        table["error"] = found["error"].fillna("")
        return cls(artifact, scored, table)

    def load(self, ids: Collection[str]) -> Iterator[StoredSample]:
        """Yield the samples ``ids``, without pictures if these were deleted. Opens only the units that hold them."""
        if self.artifact.lacks(contracts.MEDIA):
            stored = map(StoredSample, all_rows(self.artifact))
        else:
            units = sorted(self.table.loc[list(ids), "unit"].unique())
            stored = (sample for unit in units for sample in read_unit(self.artifact, int(unit)))
        yield from (sample for sample in stored if sample.sample_id in ids)
