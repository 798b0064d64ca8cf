"""Prefect's Suspend and Pause: a suspended flow run ends its process, a paused one starts no stage until Resume."""

from itertools import pairwise
from uuid import uuid4

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.exceptions import Pause
from prefect.input import RunInput
from prefect.input.run_input import keyset_from_base_key
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Suspended
from pydantic import Field

from cosmos_rl_core.errors import StageError
from flows.devices.waiting import Waiting
from flows.running.server import server_is_own

ASK_S = 2.0
"""Interval in seconds at which a paused flow run asks whether it was resumed."""
SUSPENDED = "cosmos-flows.suspended"
"""Event that the process of a suspended flow run ends and sends no further heartbeat."""


class Resume(RunInput):
    """Resume of a run that waits for somebody."""

    who: str = Field(title="Who lets the run go on", pattern=r"\S", max_length=100)
    why: str = Field(title="Why", pattern=r"\S", max_length=1000)


def stop_if_suspended() -> None:
    """Raise Prefect's ``Pause`` if the flow run was suspended: its process has to end. Sends no request.

    Prefect notifies this process in the background, within 10 s.
    """
    if (context := FlowRunContext.get()) is not None:
        context.flow_run_suspension_request.raise_if_requested()


def wait_while_paused(waiting: Waiting) -> None:
    """Return when stages may start: at once, unless the flow run is paused.

    Raises Prefect's ``Pause`` if the flow run is suspended, and :class:`StageError` if it ended instead of being
    resumed: Prefect ends it when the pause's time limit is over. If the server does not answer, nothing changes.
    """
    paused = False
    while True:
        state = _state()
        if state is not None and state.is_paused():
            if state.state_details.pause_reschedule:
                raise Pause(state=state)
            paused = True
        elif not paused or (state is not None and state.is_running()):
            return
        elif state is not None and state.is_final():
            why = "the flow run was paused, and ended instead of being resumed"
            raise StageError.of("busy", f"{why}: it is {state.name} now: {state.message}")
        waiting.turn("paused in Prefect: no stage starts until Resume", ASK_S)


def suspend(evidence: str, message: str) -> None:
    """Suspend the flow run without a time limit and raise Prefect's ``Pause``: its process has to end.

    Resume then shows the form :class:`Resume`. Returns if the flow run has no deployment, whose worker could resume
    it, or if the server does not answer.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return
    state = Suspended(message=message, pause_key=f"{evidence} {uuid4()}")
    form = keyset_from_base_key(f"resume-{uuid4()}")
    state.state_details.run_input_keyset = {**form}
    try:
        # First, because Prefect refuses Resume without the form.
        Resume.save(form, context.flow_run.id)
        with get_client(sync_client=True) as client:
            result = client.set_flow_run_state(context.flow_run.id, state)
    except httpx.HTTPError:
        return
    if result.status == SetStateStatus.ACCEPT:
        announce_end()
        raise Pause(state=result.state)


def resumed(evidence: str) -> tuple[str, str] | None:
    """Return in words who resumed the flow run after it was suspended on this evidence, and why; None if nobody did.

    A retry, and an automation that sets another state, is no Resume. If the server does not answer, nobody did.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.deployment_id is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            states = client.read_flow_run_states(context.flow_run.id)
        ordered = sorted(states, key=lambda state: state.timestamp)
        for state, following in pairwise(ordered):
            asked = state.name == "Suspended" and (state.state_details.pause_key or "").startswith(evidence)
            if asked and following.name == "Resuming":
                by = f"Resume of the flow run {context.flow_run.name} in Prefect"
                # Flow runs of earlier versions had no form.
                if (form := state.state_details.run_input_keyset) is None:
                    return by, ""
                said = Resume.model_validate_json(client.read_flow_run_input(context.flow_run.id, form["response"]))
                return f"{said.who.strip()} by {by}", said.why.strip()
    except httpx.HTTPError:
        return None
    return None


def announce_end() -> None:
    """Emit :data:`SUSPENDED`, so that the automation for crashed flow runs waits for no more heartbeats."""
    if (context := FlowRunContext.get()) is not None and context.flow_run is not None:
        flow_run = f"prefect.flow-run.{context.flow_run.id}"
        emit_event(SUSPENDED, resource={"prefect.resource.id": flow_run})


def _state() -> State | None:
    """Return the flow run's state; None outside of a flow run, on a command's own server, or without an answer."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or server_is_own():
        return None
    try:
        once = temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0})
        with once, get_client(sync_client=True) as client:
            return client.read_flow_run(context.flow_run.id).state
    except httpx.HTTPError:
        return None
