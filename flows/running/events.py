"""Events of runs for automations of Prefect: each tells what this process did, never what was already current.

They wait in the queue of Prefect's heartbeats, so a run goes on while the server does not answer. None is sent outside
of a flow run, or to a command's own server, which nobody looks at.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext, FlowRunContext
from prefect.events import emit_event
from prefect.states import Completed
from pydantic import ValidationError

from cosmos_rl_core.storage import store
from flows.planning.base import AnyRun, run_url
from flows.running.server import server_is_own
from stages.artifacts import snapshots
from stages.artifacts.manifest import Manifest
from stages.registry import trains
from stages.reporting.contracts import Report

PREFIX = "cosmos-flows"
POLICY_COMMITTED = f"{PREFIX}.policy.committed"
WARNING_TRIPPED = f"{PREFIX}.warning.tripped"
BUDGET_REACHED = f"{PREFIX}.budget.reached"
AUDIT_FAILED = f"{PREFIX}.audit.failed"
RUN_FINISHED = f"{PREFIX}.run.finished"
FILES_CHANGED = f"{PREFIX}.files-changed"
"""Emitted by a program of the user's that adds files to a dataset."""
FIRST = 10
"""Number of faults that an event names."""


def policies_committed(run: AnyRun, begun: Container[str], made: Iterable[Manifest]) -> None:
    """Emit :data:`POLICY_COMMITTED`, and an asset, for each trained policy whose slot this process has ``begun``."""
    for policy in made:
        if trains(policy.stage) and policy.iteration is not None and policy.slot in begun:
            numbers = {"iteration": policy.iteration, "version": policy.iteration + 1, "policy": policy.slot}
            facts = numbers | {"content": policy.content}
            _emit(POLICY_COMMITTED, run.store_url, run.plan.run_id, facts)
            data = run.plan.data_snapshot
            upstream = [] if data is None else [snapshots.root_of(run.store_url, data.dataset)]
            _materialized(store.join(run.url, "policy"), f"policy of {run.plan.run_id}", upstream, facts)


def warning_tripped(run: AnyRun, k: int, tripped: Sequence[str], decision: str, page: str) -> None:
    """Emit :data:`WARNING_TRIPPED` for limits that an iteration exceeds, with the decision of the recipe."""
    facts = {"iteration": k, "tripped": [*tripped], "decision": decision, "page": page}
    _emit(WARNING_TRIPPED, run.store_url, run.plan.run_id, facts)


def budget_reached(run: AnyRun, reason: str) -> None:
    """Emit :data:`BUDGET_REACHED` for a run that ends at its limit of device hours."""
    limit_h = run.recipe.train.max_gpu_hours
    _emit(BUDGET_REACHED, run.store_url, run.plan.run_id, {"max_gpu_hours": limit_h, "reason": reason})


def run_finished(run: AnyRun, result: str, held_out: Mapping[str, Sequence[float]]) -> None:
    """Emit :data:`RUN_FINISHED` with the held-out numbers of the base policy and the final one."""
    num_iterations = run.recipe.train.num_iterations
    facts = {
        "iterations": num_iterations,
        "policy": run.slots.policy(num_iterations),
        "report": store.join(run.slots.report, Report.PAGE),
        "result": result,
        "held_out": {name: [*values] for name, values in held_out.items()},
    }
    _emit(RUN_FINISHED, run.store_url, run.plan.run_id, facts)


def audit_failed(store_url: str, run_id: str, faults: Sequence[str]) -> None:
    """Emit :data:`AUDIT_FAILED` for a run in which an audit found faults."""
    _emit(AUDIT_FAILED, store_url, run_id, {"faults": len(faults), "first": [*faults[:FIRST]]})


def dataset_prepared(store_url: str, made: snapshots.Snapshot) -> None:
    """Emit an asset for a snapshot of a dataset that was just written."""
    url = snapshots.url_of(store_url, made.dataset, made.number)
    facts = {"snapshot": made.number, "url": url, "digest": made.digest}
    _materialized(snapshots.root_of(store_url, made.dataset), f"dataset {made.dataset}", [], facts)


def _is_heard() -> bool:
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and not server_is_own()


def _emit(event: str, store_url: str, run_id: str, facts: Mapping[str, Any]) -> None:
    """Emit an event. Prefect adds flow run, deployment and tags to its related resources."""
    if _is_heard():
        place = {"run": run_id, "store": store.absolute(store_url), "url": run_url(store_url, run_id)}
        resource = {
            "prefect.resource.id": f"{PREFIX}.run.{run_id}",
            "prefect.resource.name": run_id,
            f"{PREFIX}.store": place["store"],
        }
        emit_event(event, resource=resource, payload={**place, **facts})


def _materialized(url: str, name: str, upstream: Sequence[str], facts: Mapping[str, Any]) -> None:
    """Emit that an asset was made. Prefect Cloud has a page for each asset.

    An asset is left out if its URL has characters that Prefect refuses in a key, such as a space.
    """
    if not _is_heard():
        return
    try:
        asset = Asset(key=_key(url), properties=AssetProperties(name=name))
        sources = {Asset(key=_key(one)) for one in upstream}
    except ValidationError:
        return
    context = AssetContext(
        downstream_assets={asset},
        direct_asset_dependencies=sources,
        materialized_by="cosmos-rl-flows",
        materialization_metadata={asset.key: {**facts}},
    )
    context.emit_events(Completed())


def _key(url: str) -> str:
    return url if "://" in url else f"file://{url}"
