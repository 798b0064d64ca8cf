"""Held-out samples of a report: the same prompts and seeds by policy version."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stages.formats.samples import StoredSample
from stages.reporting.inputs import Samples
from stages.reporting.pictures import Picture, picture

T = TypeVar("T")
SAMPLES_SHOWN = 6
"""Held-out samples shown at several policy versions."""
VERSIONS_SHOWN = 8
"""Policy versions at which they are shown, the first and the last among them."""


@dataclass(frozen=True)
class Card:
    """One sample."""

    name: str
    """``best``, ``worst``, ``only``, ``failed``, ``base``, ``final`` or ``policy <k>``."""
    picture: Picture
    facts: Any
    """Its row: ``prompt``, ``score``, ``failed``, ``error`` and, of a rollout, ``advantage``."""


def card(name: str, table: Any, sample: StoredSample) -> Card:
    """Return the card of a stored sample with its row of ``table``."""
    return Card(name, picture(sample), table.loc[sample.sample_id])


def evenly(values: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` of the values, evenly spaced, the first and the last among them."""
    count = min(most, len(values))
    return [values[i * (len(values) - 1) // max(1, count - 1)] for i in range(count)]


def over_time(evaluations: Sequence[Samples], versions: Sequence[int]) -> list[list[Card]]:
    """Return some samples, each at several policy versions; none if there are fewer than three versions."""
    if len(evaluations) < 3:
        return []
    shown = evenly([*zip(versions, evaluations, strict=True)], VERSIONS_SHOWN)
    common = [i for i in evaluations[0].table.index if all(i in samples.table.index for _, samples in shown)]
    ids = evenly(common, SAMPLES_SHOWN)
    loaded = [(f"policy {k}", samples.table, samples.load(ids)) for k, samples in shown]
    return [[card(name, table, stored[i]) for name, table, stored in loaded] for i in ids]
