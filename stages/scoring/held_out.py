"""Measurements of policies on held-out data, for every stage that makes some."""

from collections.abc import Iterator
from typing import Any, Protocol, cast

from cosmos_rl_core.estimates.estimate import Compared
from stages import registry
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest


class Reader(Protocol):
    """A module that reads the artifacts of one stage, also of its earlier versions."""

    def summary_from(self, artifact: Artifact) -> dict[str, Any]:
        """Return the numbers of the artifact's summary that follow from its table."""
        ...

    def numbers_of(self, manifest: Manifest) -> dict[str, Any]:
        """Return the numbers of the artifact's line in ``metrics.jsonl``, in order, by their names after ``val/``."""
        ...

    def compared(self, a: Artifact, b: Artifact) -> Iterator[Compared]:
        """Yield each number that both artifacts have. Measurements of both on the same items are paired."""
        ...


def reader_of(stage: str) -> Reader | None:
    """Return the reader of a stage's artifacts; None for a stage that measures nothing on held-out data."""
    return cast("Reader | None", registry.held_out_reader_of(stage))
