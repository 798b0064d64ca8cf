"""The facts of a solver, which plans read without making its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Alike = Mapping[str, tuple[Any, ...]]
"""Settings of a scheduler, each with all values that make the same steps; the first is the default of its class."""


@dataclass(frozen=True)
class Solver:
    """Facts of a solver."""

    settings: tuple[str, ...] = ()
    """Fields of :class:`cosmos_rl_core.config.policy.SolverConfig` that it reads, apart from the number of steps and
    the guidance scale."""
    schedulers: Mapping[str, Alike] = field(default_factory=dict[str, Alike])
    """Scheduler classes of diffusers whose steps it repeats, each with the settings for which the steps are equal."""
    own_levels: bool = False
    """Whether the solver has noise levels of its own, in place of the pipeline's schedule."""
