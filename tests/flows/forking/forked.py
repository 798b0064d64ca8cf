"""Forks of runs made by hand."""

from typing import Any

from flows.forking.plan import plan_of_fork
from flows.forking.references import refer_to_origin
from flows.planning.base import AnyRun
from flows.planning.plan import ForkOf, Settings, freeze
from flows.planning.run import run_of
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of


def begun(origin: AnyRun, at: int, rewards: str | None = None, **settings: Any) -> AnyRun:
    """A fork that has its plan and its references."""
    wanted = ForkOf(origin.plan.run_id, at, rewards)
    plan = freeze(plan_of_fork(wanted, Settings("", origin.store_url, **settings)), origin.store_url)
    run = run_of(plan, origin.store_url)
    refer_to_origin(run)
    return run


def made(slot: str) -> Manifest:
    """The current artifact of a slot: its own, or one that it refers to."""
    _, manifest = current_of(slot)
    assert manifest is not None
    return manifest
