"""Kinds of runs that train something else than a diffusion model. Each ``flows/*/kind.py`` defines one as ``KIND``.

A kind adds only what differs. The loop over waves, audit, cost, replay and the frame of the report serve all kinds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from flows.planning.base import BasePlan

Rows = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of run."""

    claims: Callable[[Mapping[str, Any]], bool]
    """Returns whether the values of a recipe are of this kind."""
    check: Callable[[dict[str, Any], str], tuple[Any, list[str]]]
    """Builds the recipe from its values, as :func:`cosmos_rl_core.recipes.reading.checked` does."""
    plan: type[BasePlan[Any]]
    """Class of its plans. No two kinds share one."""
    make_plan: Callable[..., Any]
    """Makes a plan of a recipe. Its other arguments: run id, source, known mistakes, ``without_weights``."""
    written: Callable[[Any], dict[str, Any]]
    """Returns the recipe of a plan as a person would write it, with its tables in order. Forks begin with it."""
    run: Callable[[Any, str], Any]
    """Makes a run of a plan and the address of the store."""
    summary: str
    """Sentence on what its runs do, the description of their flow in Prefect."""
    waves: Callable[..., Iterator[Any]]
    """Yields the waves of a run, as :func:`flows.post_train.post_train` does."""
    stages: Callable[[Any], list[str]]
    """Returns the stages with torch that a run of a recipe may have."""
    shape: Callable[[Any, dict[str, Any]], dict[str, Any]]
    """Returns the settings that decide the arithmetic of an iteration, from a plan and the launch settings."""
    about: Callable[[Any], Rows]
    """Returns rows that describe a plan, as :func:`flows.planning.facts.about` does."""
    data: Callable[[Any], dict[str, str]]
    """Returns the data of a plan for a comparison: texts by name."""
    explained: Callable[[Any, str, str], tuple[str, Sequence[Any], str]]
    """Returns a text on what the run of a plan would do, the memory of its stages, and what that memory leaves out."""
    as_json: Callable[[Any, str], dict[str, Any]]
    """Returns a plan for scripts."""
    reads: Callable[[Any], Iterator[str]]
    """Yields the slots that a run reads besides the inputs of its Requests, for ``gc``."""


@cache
def known() -> tuple[Kind, ...]:
    """Return every kind."""
    folders = sorted(path.parent.name for path in Path(__file__).parents[1].glob("*/kind.py"))
    return tuple(import_module(f"flows.{folder}.kind").KIND for folder in folders)


def claiming(values: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a recipe's values; None for a diffusion model's."""
    return next((kind for kind in known() if kind.claims(values)), None)


def of(plan: object) -> Kind | None:
    """Return the kind of a plan; None for a diffusion model's."""
    return next((kind for kind in known() if isinstance(plan, kind.plan)), None)
