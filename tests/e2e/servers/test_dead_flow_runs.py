"""The automation for dead flow runs, on a server that others use too: real states and events, no process."""

import time
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Paused, Running, Suspended

from flows.operations import automations, pools
from flows.running import pauses
from flows.running.tags import PROJECT
from tests.e2e.flow_process import eventually

pytestmark = pytest.mark.slow
SILENCE_S = 15.0
NOTICED_S = 90.0
"""The server looks for silence every few seconds."""


@flow(name="anybody")
def anybody() -> None:
    """A flow that never begins."""


@pytest.fixture
def client(prefect_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    """A client of a server with the automation, which loses its patience sooner."""
    with temporary_settings({PREFECT_API_URL: prefect_environment["PREFECT_API_URL"]}):
        monkeypatch.setattr(automations, "SILENCE", timedelta(seconds=SILENCE_S))
        pools.set_up(None, "process")
        with get_client(sync_client=True) as client:
            yield client
        monkeypatch.undo()
        pools.set_up(None, "process")


def begin(client: SyncPrefectClient, *tags: str) -> UUID:
    """A flow run that is at work, as far as the server can tell."""
    found = client.create_flow_run(anybody, tags=tags, state=Running())
    emit("prefect.flow-run.heartbeat", found.id, *tags)
    return found.id


def emit(event: str, flow_run: UUID, *tags: str) -> None:
    related = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in tags]
    emit_event(event, resource={"prefect.resource.id": f"prefect.flow-run.{flow_run}"}, related=related)


def test_only_flow_runs_of_this_project_that_fell_silent_at_work_are_crashed(client: SyncPrefectClient):
    def state(flow_run: UUID) -> str | None:
        found = client.read_flow_run(flow_run).state
        assert found is not None
        return found.name

    dead, foreign, suspended, paused = (
        begin(client, *tags) for tags in ((PROJECT,), ("theirs",), (PROJECT,), (PROJECT,))
    )
    client.set_flow_run_state(suspended, Suspended(timeout_seconds=600), force=True)
    client.set_flow_run_state(paused, Paused(timeout_seconds=600), force=True)
    # The process of a suspended flow run may still have a heartbeat, and then says that it ends.
    emit("prefect.flow-run.heartbeat", suspended, PROJECT)
    emit(pauses.SUSPENDED, suspended, PROJECT)
    EventsWorker.instance().wait_until_empty()

    def is_noticed() -> bool:
        # Whoever waits for Resume is at work.
        emit("prefect.flow-run.heartbeat", paused, PROJECT)
        time.sleep(1.0)
        return state(dead) == "Crashed"

    assert eventually(is_noticed, NOTICED_S)
    end_s = time.monotonic() + SILENCE_S
    assert eventually(lambda: is_noticed() and time.monotonic() > end_s, NOTICED_S)
    assert (state(foreign), state(suspended), state(paused)) == ("Running", "Suspended", "Paused")
