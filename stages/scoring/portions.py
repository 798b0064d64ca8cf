"""Portions of samples, which are scored together and kept together: a unit, or all samples of a prompt."""

from dataclasses import dataclass
from typing import Any

from stages.artifacts.artifact import Artifact
from stages.formats.samples import all_rows, unit_name


@dataclass(frozen=True)
class Portion:
    """Samples that are scored together."""

    number: int
    """Its place among the portions."""
    units: dict[int, list[str]]
    """Ids of its samples by the unit that has them, in order."""

    @property
    def ids(self) -> list[str]:
        """Return the ids of its samples, in order."""
        return [one for ids in self.units.values() for one in ids]


@dataclass(frozen=True)
class Portions:
    """All samples of an artifact, in portions."""

    all: list[Portion]
    layout: dict[str, Any]
    """The portions as they are committed."""
    order: dict[str, int]
    """Place of each sample in the index."""


def portions_of(samples: Artifact, part: str, *, groupwise: bool) -> Portions:
    """Return the units of an artifact; with ``groupwise`` its prompts, whose samples may lie in several units.

    What is scored together then depends on the prompts alone, and not on how samples were cut into units.
    """
    found: dict[Any, dict[int, list[str]]] = {}
    order: dict[str, int] = {}
    for row in all_rows(samples):
        units = found.setdefault(row["prompt_id"] if groupwise else row["unit"], {})
        units.setdefault(row["unit"], []).append(row["sample_id"])
        order[row["sample_id"]] = len(order)
    names = {"prompts": [*found]} if groupwise else {"units": [unit_name(part, number) for number in found]}
    return Portions([Portion(number, units) for number, units in enumerate(found.values())], names, order)
