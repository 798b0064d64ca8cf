"""``run`` as ``cosmos-flows`` does it, with the same waves, lease and numbers, but without Prefect and its server."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Annotated, Literal

import typer

from cosmos_rl_core.errors import CosmosRLError, StageError, no_space
from flows.forking.plan import plan_of_fork
from flows.forking.references import refer_to_origin
from flows.lineage.origin import StoredRollouts
from flows.operations.upgrades import settled
from flows.planning import requests
from flows.planning.base import AnyRun
from flows.planning.plan import ForkOf, Settings, freeze, plan_of
from flows.planning.run import run_of
from flows.running.display import Display
from flows.running.progress import Reporter
from flows.running.wave import Waves
from flows.session.loop import make
from flows.watching.tracking import Tracker
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import current_manifest


def missing_of(requests: Sequence[Request]) -> list[Request]:
    """Return the Requests without a current artifact."""
    return [request for request in requests if current_manifest(request) is None]


def launch(waves: Waves, tracker: Tracker, run: AnyRun, name: str, *requests: Request) -> list[Manifest]:
    """Make a wave, trying again what may pass."""
    skipped = not missing_of(requests)
    for attempt in range(waves.config.max_attempts):
        try:
            if missing := missing_of(requests):
                waves.make(name, missing)
        except StageError as error:
            if not error.retryable or attempt + 1 == waves.config.max_attempts:
                raise
            waves.display.note(f"another attempt follows: {error}")
    manifests = [manifest for request in requests if (manifest := current_manifest(request)) is not None]
    waves.display.done(name, manifests, skipped=skipped)
    tracker.done(requests, manifests)
    if any(one.stage == "warn" for one in manifests):
        # It imports Prefect.
        import_module("flows.warning.gate").pass_gate(run, manifests, waves.display.note)
    return manifests


def train(settings: Settings) -> None:
    """Take a recipe or a fork to its end, or go on with it."""
    plan = plan_of(settings) if settings.fork is None else plan_of_fork(settings.fork, settings)
    plan = freeze(plan, settings.store)
    run = run_of(plan, settings.store)
    if plan.origin is not None:
        refer_to_origin(run)
    run = settled(run, remake=False)
    with run.lease() as lease, Reporter(run.url) as reporter, Display(reporter=reporter) as shown:
        waves = Waves(run.url, plan.recipe.launch, shown, settings.allow_numerics_change, lease.check)
        waves.overlapping = partial(requests.rewards_ahead, run)
        try:
            with Tracker(run, shown.note) as tracker:
                make(run, partial(launch, waves, tracker, run))
        finally:
            waves.close()


def main(
    command: Literal["run", "fork"],
    named: str,
    store: Annotated[str, typer.Option()],
    run_id: Annotated[str, typer.Option()],
    iterations: int | None = None,
    overrides: Annotated[list[str] | None, typer.Option("--set")] = None,
    allow_numerics_change: bool = False,
    at: int = 0,
    stored: bool = False,
) -> None:
    """Take the options of ``cosmos-flows run`` and ``fork`` that tests give, and give their exit codes.

    With ``stored`` a fork trains on the rollouts of its origin, as a setting of ``cosmos-flows what-if``.
    """
    settings = Settings(named, store, run_id, iterations, tuple(overrides or ()), None, allow_numerics_change)
    wanted = ForkOf(named, at, stored=StoredRollouts(max_drift=100) if stored else None)
    settings = replace(settings, fork=wanted if command == "fork" else None)
    try:
        train(settings)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        known = error if isinstance(error, CosmosRLError) else no_space(error)
        if known is None:
            raise
        # Its output may be on the full disk.
        with suppress(OSError):
            print(known.in_full() if isinstance(known, StageError) else known, file=sys.stderr, flush=True)
        sys.exit(known.exit_code)


if __name__ == "__main__":
    typer.run(main)
