"""Tasks that a killed process left at work in Prefect: a later try of their flow run tells Prefect that they ended."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Crashed

UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.PAUSED, StateType.CANCELLING]
WHY = "its process ended before it did; the flow run was tried again"


@contextmanager
def lost_tasks_ended() -> Iterator[None]:
    """End the tasks of earlier tries of this flow run, whose processes are dead, before and after a piece of work.

    After it too, because a busy server may hear of a task late. A first try sends no request. A server that does not
    answer changes nothing.
    """
    context = FlowRunContext.get()
    flow_run = None if context is None else context.flow_run
    if flow_run is None or flow_run.run_count < 2:
        yield
        return
    # No task of this try exists yet, so all that are at work are lost.
    _end(flow_run, earlier_tries=range(flow_run.run_count))
    try:
        yield
    finally:
        # Prefect counts a task's try when it starts to run. One that the server knows only as pending has 0, and may
        # be of this try: its start or end is on its way to the server.
        _end(flow_run, earlier_tries=range(1, flow_run.run_count))


def _end(flow_run: FlowRun, earlier_tries: range) -> None:
    at_work = TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=UNFINISHED)))
    mine = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            for found in client.read_task_runs(flow_run_filter=mine, task_run_filter=at_work):
                if found.flow_run_run_count in earlier_tries:
                    client.set_task_run_state(found.id, Crashed(message=WHY), force=True)
    except httpx.HTTPError:
        return
