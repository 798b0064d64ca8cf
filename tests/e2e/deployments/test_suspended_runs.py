"""Runs that a limit on scores suspends: by the command, and in a deployment, where Prefect resumes them."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.running import events
from flows.warning.decisions import Decision, decisions_on
from stages.artifacts.slots import current_of
from tests.e2e.deployed import Deployed
from tests.e2e.flow_process import Flows, eventually, final_policy

LIMITS = "early_warning.limits=[{ reward = 'ocr', above = 0.6 }]"
"""It trips in every iteration but the first, whose mean is 0.5625."""
SUSPENDS = "early_warning.on_trip=suspend"
TIMEOUT_S = 120.0


def decided(flows: Flows, k: int) -> list[Decision]:
    """The decisions on the warning of an iteration."""
    _, manifest = current_of(str(flows.root / f"iterations/{k:04d}/warn"))
    assert manifest is not None
    return decisions_on(manifest)


@pytest.mark.usefixtures("with_prefect")
def test_a_suspended_command_ends_with_77_until_somebody_approves(flows: Flows, reference: Flows) -> None:
    flows.forget("iterations/0001/update", "report")
    options = ("--set", LIMITS, "--set", SUSPENDS)
    for _ in range(2):
        assert "iteration 1 exceeds its limits" in flows.run(*options, expect=77)
    assert not (flows.root / "iterations/0001/update").exists()
    said = flows.command("status")
    assert "was suspended by a warning" in said
    assert f"cosmos-flows approve {flows.root.name}" in said
    flows.command("approve", "--note", "read the signs")
    assert [one.word for one in decided(flows, 1)] == ["suspended", "approved"]
    flows.run("--set", LIMITS, "--set", "early_warning.on_trip=mark")
    assert [one.word for one in decided(flows, 2)] == ["marked"]
    assert final_policy(flows) == final_policy(reference)
    assert flows.nothing_is_left()


@pytest.fixture
def deployed(prefect_environment: dict[str, str], tmp_path: Path, reference: Flows) -> Iterator[Deployed]:
    """A worker with all deployments, and a store with two iterations of the run."""
    deployed = Deployed(tmp_path / "deployed", prefect_environment)
    deployed.set_up(gpus=2)
    shutil.copytree(reference.store, deployed.store)
    deployed.forget("iterations/0001/update", "iterations/0002", "exports/0003", "report")
    yield deployed
    deployed.close()


@pytest.mark.slow
def test_a_deployment_is_suspended_until_resume_or_an_approval_and_a_retry_stops_there(
    deployed: Deployed, reference: Flows
) -> None:
    flow_run = deployed.schedule("nft/tiny-nft", deployed.parameters(overrides=[LIMITS, SUSPENDS]))
    assert "iteration 1 exceeds its limits" in deployed.wait(flow_run, "PAUSED")["message"]
    assert deployed.state(flow_run)["name"] == "Suspended"
    assert eventually(lambda: not deployed.leftovers(), TIMEOUT_S)
    # Cancelled and retried, it stops at the same place: a retry is no Resume.
    deployed.prefect("flow-run", "cancel", flow_run)
    deployed.wait(flow_run, "CANCELLED")
    deployed.prefect("flow-run", "retry", flow_run)
    deployed.wait(flow_run, "PAUSED")
    assert [one.word for one in decided(deployed, 1)] == ["suspended"]
    assert not (deployed.root / "iterations/0001/update").exists()
    # The form asks who and why.
    assert [deployed.resume(flow_run), deployed.resume(flow_run, who="anna", why=" ")] == ["REJECT", "REJECT"]
    assert deployed.resume(flow_run, who="anna", why="the signs can be read") == "ACCEPT"
    assert eventually(lambda: (deployed.root / "iterations/0002/warn/decisions").exists(), TIMEOUT_S)
    deployed.wait(flow_run, "PAUSED")
    last = decided(deployed, 1)[-1]
    assert (last.word, last.note) == ("approved", "the signs can be read")
    assert last.by.startswith("anna by Resume of the flow run")
    assert "anna by Resume" in deployed.command("status")
    deployed.command("approve")
    assert deployed.resume(flow_run, who="anna", why="approved already") == "ACCEPT"
    deployed.wait(flow_run, "COMPLETED")
    assert [one.word for one in decided(deployed, 2)] == ["suspended", "approved"]
    assert "@" in decided(deployed, 2)[-1].by
    # Each warning once, whatever retries saw of it; and policies that this flow run made: others were already current.
    assert eventually(lambda: deployed.events(flow_run, events.RUN_FINISHED), TIMEOUT_S)
    warnings = [one["payload"] for one in deployed.events(flow_run, events.WARNING_TRIPPED)]
    assert [(one["iteration"], one["decision"]) for one in warnings] == [(1, "suspended"), (2, "suspended")]
    policies = [one["payload"] for one in deployed.events(flow_run, events.POLICY_COMMITTED)]
    assert [one["version"] for one in policies] == [2, 3]
    assert final_policy(deployed) == final_policy(reference)
