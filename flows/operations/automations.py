"""Automations of a Prefect server: crashed flow runs, messages, audits of finished runs, new files of datasets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.events.schemas.automations import AutomationCore

from cosmos_rl_core.errors import Mistakes, mistakes_in
from flows.running import tags
from flows.running.events import FILES_CHANGED, PREFIX, RUN_FINISHED
from flows.running.pauses import SUSPENDED

ZOMBIES = "cosmos: crash flow runs without a heartbeat"
SILENCE = timedelta(seconds=90)
"""Three heartbeats: deployments set ``PREFECT_FLOWS_HEARTBEAT_FREQUENCY = 30``."""
ENDED = ("Completed", "Failed", "Cancelled", "Crashed", "Suspended", "Paused")
"""States in which a silent flow run is no crash: without a process, and ``Paused``."""
WAITING = ("Scheduled", "Late", "Pending", "AwaitingRetry", "AwaitingConcurrencySlot", "Resuming")
"""States that wait for a worker, for the first time or again, and have no process yet."""
FLOW_RUNS = {"prefect.resource.id": "prefect.flow-run.*"}
OURS = {"prefect.resource.id": f"prefect.tag.{tags.PROJECT}"}
"""Related resource of every flow run of this project."""
SENDS = "notify"
"""Capability of blocks that send messages."""
MAKE_BLOCK = "make one in Prefect's UI, under Blocks"
DEPLOY = 'make it with `prefect --no-prompt deploy --all --prefect-file "$(cosmos-flows shipped prefect.yaml)"`'


@dataclass(frozen=True)
class Wanted:
    """Block and deployments for automations, by the names that Prefect shows."""

    message: str | None = None
    """Block that sends a message when a flow run waits for people, such as ``slack-webhook/team``."""
    audit: str | None = None
    """Deployment that audits each run when it is finished."""
    prepare: Sequence[str] = ()
    """Deployments that prepare their datasets when the files have changed."""


def put_automations(client: SyncPrefectClient, wanted: Wanted) -> list[str]:
    """Create or correct the automation for crashed flow runs, and the automations in ``wanted``; return their names.

    Raises :class:`ConfigError`, before anything is changed, with all names of blocks and deployments that the server
    does not have.
    """
    wrong = Mistakes()
    found = [_crashes(), *_messages(client, wanted, wrong), *_deployments(client, wanted, wrong)]
    if wrong:
        raise mistakes_in("Prefect's server", wrong)
    for one in found:
        automation = AutomationCore.model_validate(one)
        if known := client.read_automations_by_name(automation.name):
            client.update_automation(known[0].id, automation)
        else:
            client.create_automation(automation)
    return [one["name"] for one in found]


def _crashes() -> dict[str, Any]:
    heartbeat = "prefect.flow-run.heartbeat"
    states = (f"prefect.flow-run.{state}" for state in (*ENDED, *WAITING))
    crash = {"type": "change-flow-run-state", "name": "Crashed", "state": "CRASHED", "force": False}
    return {
        "name": ZOMBIES,
        "description": "A running flow run of cosmos-flows sends no heartbeats: its process and its worker have ended.",
        "trigger": {
            "type": "event",
            "posture": "Proactive",
            "after": [heartbeat],
            "expect": [heartbeat, SUSPENDED, *states],
            "match": FLOW_RUNS,
            "match_related": OURS,
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": SILENCE,
        },
        "actions": [crash | {"message": "no heartbeat; a retry resumes the run"}],
    }


def _messages(client: SyncPrefectClient, wanted: Wanted, wrong: Mistakes) -> Iterator[dict[str, Any]]:
    """Yield the automation that sends a message when a flow run waits for people, if it is wanted."""
    if wanted.message is None:
        return
    documents = client.read_block_documents(include_secrets=False)
    blocks = {
        f"{one.block_type.slug}/{one.name}": one.id
        for one in documents
        if one.block_type and one.block_schema and SENDS in one.block_schema.capabilities
    }
    if wanted.message not in blocks:
        wrong.append(_missing("block that sends messages", wanted.message, blocks, MAKE_BLOCK))
        return
    send = {"type": "send-notification", "block_document_id": blocks[wanted.message]}
    text = {
        "subject": "{{ flow_run.name }} is {{ flow_run.state.name }}",
        "body": "{{ flow_run.state.message or '' }}\n{{ flow_run|ui_url }}",
    }
    yield {
        "name": f"cosmos: a message by {wanted.message} when a flow run waits for people",
        "description": "A flow run of cosmos-flows was suspended or paused; Resume lets it go on.",
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "expect": ["prefect.flow-run.Suspended", "prefect.flow-run.Paused"],
            "match": FLOW_RUNS,
            "match_related": OURS,
        },
        "actions": [send | text],
    }


def _deployments(client: SyncPrefectClient, wanted: Wanted, wrong: Mistakes) -> Iterator[dict[str, Any]]:
    """Yield the automations that run the deployments in ``wanted``. Add unknown names to ``wrong``."""
    if wanted.audit is not None:
        run = {"run_id": "{{ event.payload.run }}", "store": "{{ event.payload.store }}"}
        for name, action in _runs(client, "audit", [wanted.audit], wrong):
            yield {
                "name": f"cosmos: {name} when a run is finished",
                "description": "Everything in the run is compared with its digest.",
                "trigger": _on(RUN_FINISHED, f"{PREFIX}.run.*"),
                "actions": [action | {"parameters": run}],
            }
    for name, action in _runs(client, "preprocess", wanted.prepare, wrong):
        dataset = f"{PREFIX}.dataset.{name.partition('/')[2]}"
        yield {
            "name": f"cosmos: {name} when files have changed",
            "description": f"prefect event emit {FILES_CHANGED} --resource-id {dataset}",
            "trigger": _on(FILES_CHANGED, dataset),
            "actions": [action],
        }


def _on(event: str, resource: str) -> dict[str, Any]:
    match = {"prefect.resource.id": resource}
    return {"type": "event", "posture": "Reactive", "expect": [event], "match": match, "threshold": 1}


def _runs(
    client: SyncPrefectClient, flow: str, names: Sequence[str], wrong: Mistakes
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names of a flow's deployments, each with the action that runs it. Add unknown names to ``wrong``."""
    deployed = client.read_deployments(flow_filter=FlowFilter(name=FlowFilterName(any_=[flow]))) if names else []
    known = {f"{flow}/{one.name}": one.id for one in deployed}
    for name in dict.fromkeys(names):
        if name in known:
            yield name, {"type": "run-deployment", "source": "selected", "deployment_id": known[name]}
        else:
            wrong.append(_missing(f"deployment of the flow {flow!r}", name, known, DEPLOY))


def _missing(what: str, name: str, known: Mapping[str, Any], advice: str) -> str:
    return f"there is no {what} {name!r}; known: {', '.join(sorted(known)) or 'none'}; {advice}"
