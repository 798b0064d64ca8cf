"""Set-up of a Prefect server for deployments: work pool, queues, GPU limit and automations."""

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectNotFound

from cosmos_rl_core.errors import ConfigError
from flows.operations.automations import Wanted, put_automations

WORK_POOL = "cosmos"
QUEUES = {"checks": 1, "training": 2}
"""Priorities by queue, 1 first: the flight check starts before waiting runs."""
GPUS = "gpus"
"""Global concurrency limit with a concurrency slot a GPU. A cluster profile names it in ``gpu_limit``; see
:mod:`flows.running.gpus`."""
DEFAULT_GPUS = 8


@dataclass(frozen=True)
class Objects:
    """Objects of a server that deployments need."""

    pool: str
    pool_type: str
    queues: dict[str, int]
    """Priorities by queue."""
    limit: str
    slots: int
    """Concurrency slots of the limit."""
    automations: list[str]

    def lines(self) -> Iterator[str]:
        """Yield a line about each object."""
        yield f"work pool {self.pool!r} of type {self.pool_type}"
        yield from (f"queue {name!r} with priority {priority}" for name, priority in self.queues.items())
        yield f"global concurrency limit {self.limit!r} of {self.slots}"
        yield from (f"automation {name!r}" for name in self.automations)


def set_up(gpus: int | None, pool_type: str, wanted: Wanted | None = None) -> Objects:
    """Create missing objects and correct different ones. Safe to repeat.

    With ``gpus`` None an existing limit stays unchanged. Raises :class:`ConfigError` if the pool exists with another
    type, or the server has no such type, block or deployment.
    """
    with get_client(sync_client=True) as client:
        _pool(client, pool_type)
        for name, priority in QUEUES.items():
            _queue(client, name, priority)
        limit = _limit(client, gpus)
        automations = put_automations(client, wanted or Wanted())
    return Objects(WORK_POOL, pool_type, QUEUES, GPUS, limit, automations)


def _pool(client: SyncPrefectClient, kind: str) -> None:
    try:
        found = client.read_work_pool(WORK_POOL).type
    except ObjectNotFound:
        workers = dict(ChainMap(*client.read_worker_metadata().values()))
        if kind not in workers:
            known = ", ".join(sorted(workers))
            raise ConfigError(f"unknown worker type {kind!r}; known: {known}") from None
        template = workers[kind]["default_base_job_configuration"]
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type=kind, base_job_template=template))
        return
    if found != kind:
        raise ConfigError(f"{WORK_POOL!r} has type {found!r}, expected {kind!r}; delete it, or keep its type")


def _queue(client: SyncPrefectClient, name: str, priority: int) -> None:
    try:
        found = client.read_work_queue_by_name(name, work_pool_name=WORK_POOL)
    except ObjectNotFound:
        client.create_work_queue(name, priority=priority, work_pool_name=WORK_POOL)
    else:
        client.update_work_queue(found.id, priority=priority)


def _limit(client: SyncPrefectClient, gpus: int | None) -> int:
    """Create or change the limit. Return its number of slots."""
    if gpus is None:
        try:
            return client.read_global_concurrency_limit_by_name(GPUS).limit
        except ObjectNotFound:
            gpus = DEFAULT_GPUS
    client.upsert_global_concurrency_limit_by_name(GPUS, gpus)
    return gpus
