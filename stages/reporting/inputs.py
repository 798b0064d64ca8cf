"""The generated samples of a report, with their scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from cosmos_rl_core.errors import ArtifactError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input, Request
from stages.formats.samples import StoredSample, all_rows, read_index, read_unit
from stages.formats.tables import read_table
from stages.reporting.numbers import Estimate


@dataclass(frozen=True)
class Samples:
    """Generated samples with their scores."""

    artifact: Artifact
    scores: Artifact | None
    table: Any
    """Their index with the columns ``score``, ``valid``, ``error`` and ``failed``, by sample id."""

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

    @property
    def iteration(self) -> int:
        """Return the iteration of a rollout; of an evaluation the policy version, which its scores name."""
        made = self.artifact.manifest.iteration
        scored = None if self.scores is None else self.scores.manifest.iteration
        return (scored if made is None else made) or 0

    @property
    def estimate(self) -> Estimate:
        """Return the mean score of the valid samples."""
        return Estimate.of(self.table["score"])

    def load(self, ids: Sequence[str]) -> dict[str, StoredSample]:
        """Read some samples, by id, without pictures if those were deleted. Opens only the units that hold them."""
        if self.artifact.lacks(contracts.MEDIA):
            stored = map(StoredSample, all_rows(self.artifact))
        else:
            units = sorted(self.table.loc[list(ids), "unit"].unique())
            stored = (sample for unit in units for sample in read_unit(self.artifact, int(unit)))
        return {sample.sample_id: sample for sample in stored if sample.sample_id in ids}


def scored_samples(request: Request, role: str, scores_role: str) -> list[Samples]:
    """Read the indices and scores of the samples of a role, in the order of the run.

    Raises :class:`ArtifactError` unless scores are as many as the samples they belong to.
    """
    samples, scores = request.inputs.get(role, ()), request.inputs.get(scores_role, ())
    if scores and len(scores) != len(samples):
        raise ArtifactError(
            f"the report has {len(samples)} {role} but {len(scores)} {scores_role}; give one for each, in order"
        )
    return [Samples.read(s, c) for s, c in zip(samples, scores or [None] * len(samples), strict=True)]
