"""Set-up of a Prefect server for deployments: work pool, queues, GPU limit and automation."""

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate, WorkPoolCreate
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ActionTypes, ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from cosmos_rl_core.errors import ConfigError
from flows.running import tags
from flows.running.pauses import SUSPENDED

POOL = "cosmos"
QUEUES = {"checks": 1, "training": 2}
"""Priorities by queue: the flight check starts before waiting runs."""
GPUS = "gpus"
"""Global concurrency limit with a slot a GPU. A cluster profile names it in ``gpu_limit``; see
:mod:`flows.running.gpus`."""
DEFAULT_GPUS = 8
ZOMBIES = "cosmos: crash flow runs without a heartbeat"
SILENCE = timedelta(seconds=90)
"""Three heartbeats: deployments set ``PREFECT_FLOWS_HEARTBEAT_FREQUENCY = 30``."""


def set_up(gpus: int | None, pool_type: str) -> list[str]:
    """Create missing objects and correct different ones. Return a line about each. Safe to repeat.

    With ``gpus`` None an existing limit stays unchanged. Raises :class:`ConfigError` if the pool exists with another
    type, or the server has no such type.
    """
    with get_client(sync_client=True) as client:
        lines = [_pool(client, pool_type)]
        lines += [_queue(client, name, priority) for name, priority in QUEUES.items()]
        return [*lines, _limit(client, gpus), _automation(client)]


def _pool(client: SyncPrefectClient, kind: str) -> str:
    name = f"work pool {POOL!r} of type {kind}"
    try:
        found = client.read_work_pool(POOL)
    except ObjectNotFound:
        workers = {k: w for collection in client.read_worker_metadata().values() for k, w in collection.items()}
        if kind not in workers:
            raise ConfigError(f"unknown worker type {kind!r}; known: {', '.join(sorted(workers))}") from None
        template = workers[kind]["default_base_job_configuration"]
        client.create_work_pool(WorkPoolCreate(name=POOL, type=kind, base_job_template=template))
        return f"created {name}"
    if found.type != kind:
        raise ConfigError(
            f"the work pool {POOL!r} has type {found.type!r}, expected {kind!r}; delete it, or keep its type"
        )
    return f"{name} exists"


def _queue(client: SyncPrefectClient, name: str, priority: int) -> str:
    try:
        found = client.read_work_queue_by_name(name, work_pool_name=POOL)
    except ObjectNotFound:
        client.create_work_queue(name, priority=priority, work_pool_name=POOL)
        return f"created queue {name!r} with priority {priority}"
    if found.priority == priority:
        return f"queue {name!r} exists"
    client.update_work_queue(found.id, priority=priority)
    return f"queue {name!r} now has priority {priority}, not {found.priority}"


def _limit(client: SyncPrefectClient, gpus: int | None) -> str:
    what = f"global concurrency limit {GPUS!r}"
    try:
        found = client.read_global_concurrency_limit_by_name(GPUS)
    except ObjectNotFound:
        limit = DEFAULT_GPUS if gpus is None else gpus
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=GPUS, limit=limit))
        return f"created {what} of {limit}"
    if gpus is None or found.limit == gpus:
        return f"{what} of {found.limit} exists"
    client.update_global_concurrency_limit(GPUS, GlobalConcurrencyLimitUpdate(limit=gpus))
    return f"{what} is now {gpus}, not {found.limit}"


def _automation(client: SyncPrefectClient) -> str:
    crash = ChangeFlowRunState(
        name="Crashed", state=StateType.CRASHED, message="no heartbeat; a retry resumes the run", force=False
    )
    actions: list[ActionTypes] = [crash]
    heartbeat = "prefect.flow-run.heartbeat"
    # A paused flow run has heartbeats; a suspended one has no process.
    ended = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused")
    # A flow run that waits for a worker, for the first time or again, has no process yet.
    waiting = ("Scheduled", "Late", "Pending", "AwaitingRetry", "AwaitingConcurrencySlot", "Resuming")
    wanted = AutomationCore(
        name=ZOMBIES,
        description="A running flow run of cosmos-flows sends no heartbeats: its process and its worker have ended.",
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, SUSPENDED, *(f"prefect.flow-run.{state}" for state in (*ended, *waiting))},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{tags.PROJECT}"]}),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=actions,
    )
    found = client.read_automations_by_name(ZOMBIES)
    if not found:
        client.create_automation(wanted)
        return f"created automation {ZOMBIES!r}"
    client.update_automation(found[0].id, wanted)
    return f"automation {ZOMBIES!r} exists"
