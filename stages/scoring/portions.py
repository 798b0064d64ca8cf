"""Portions of samples, which are scored together and kept together: a unit, or all samples of a prompt."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from stages.formats.samples import unit_name


@dataclass(frozen=True)
class Portion:
    """Samples that are scored together."""

    number: int
    """Place of the portion among all portions."""
    units: dict[int, list[str]]
    """Ids of its samples, in order, by number of the unit that holds them."""

    @property
    def ids(self) -> list[str]:
        """Return the ids of its samples, in order."""
        return [one for ids in self.units.values() for one in ids]


@dataclass(frozen=True)
class Portions:
    """All samples of an artifact, in portions."""

    all: list[Portion]
    layout: dict[str, Any]
    """The portions, as the reward's layout records them."""
    order: dict[str, int]
    """Place of each sample in the index."""


def portions_of(rows: Iterable[dict[str, Any]], part: str, *, groupwise: bool) -> Portions:
    """Return samples in portions: one portion per unit, or, if ``groupwise``, one per prompt.

    ``rows`` have ``sample_id``, ``prompt_id`` and ``unit`` of each sample, in order. The samples of a prompt may lie in
    several units; groupwise scores do not depend on how samples were cut into units.
    """
    found: dict[Any, dict[int, list[str]]] = {}
    order: dict[str, int] = {}
    for row in rows:
        units = found.setdefault(row["prompt_id"] if groupwise else row["unit"], {})
        units.setdefault(row["unit"], []).append(row["sample_id"])
        order[row["sample_id"]] = len(order)
    names = {"prompts": [*found]} if groupwise else {"units": [unit_name(part, number) for number in found]}
    return Portions([Portion(number, units) for number, units in enumerate(found.values())], names, order)
