"""Plans of recipes that are named on the command line."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError
from flows.cli.base.printing import say
from flows.devices import fitting
from flows.operations import import_recipe
from flows.planning.plan import Plan, Settings, plan_of
from flows.running.server import named_server


def planned(recipe: str, *others: Any, without_weights: bool = False) -> Plan:
    """Return the plan for a recipe and the other settings of a run, in their order.

    Prints a note on stderr if the recipe was translated from cosmos-rl.
    """
    if (line := import_recipe.note(recipe)) is not None:
        say(line, err=True)
    fits = partial(misfits, runs_here=not without_weights)
    return plan_of(Settings(recipe, *others), without_weights=without_weights, misfits=fits)


def misfits(launch: LaunchConfig, stages: Sequence[str], *, runs_here: bool) -> list[str]:
    """Return a message for each mistake by which stages do not fit the devices."""
    return fitting.misfits_of(launch, stages, partial(gpu_slots_of, required=runs_here), runs_here=runs_here)


def gpu_slots_of(launch: LaunchConfig, *, required: bool) -> int | None:
    """Return the slots of a profile's concurrency limit in Prefect; None without a limit, and if no server tells it.

    Raises :class:`ConfigError` if a server is named that has no such limit, which a run requires and a plan does not.
    Imports Prefect only if a server is named.
    """
    if launch.gpu_limit is None:
        return None
    try:
        return import_module("flows.running.gpus").gpu_slots(launch) if named_server() else None
    except ConfigError:
        if required:
            raise
        return None
