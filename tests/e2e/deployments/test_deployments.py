"""Deployments on a real server with a real worker: started, killed, cancelled, retried, scheduled."""

import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from cosmos_rl_core.storage import store
from flows.operations import pools
from flows.running.events import FILES_CHANGED
from flows.running.tags import PROJECT
from tests.e2e.deployed import NAMES, TIMEOUT_S, Deployed
from tests.e2e.flow_process import (
    ITERATIONS,
    RUN_ID,
    Flows,
    eventually,
    files_with,
    require_same_run,
    require_untouched,
)
from tests.flows.forking.forked import made

REWARD = "iterations/0001/reward-ocr"
CANCEL_TIMEOUT_S = 15.0
GONE_TIMEOUT_S = 60.0
LOG_LINES = 120
PAUSED_S = 6.0
"""For a stage that must not begin; the next one would begin within a second."""
NOTICED_S = 180.0
"""For the automation, which waits for three heartbeats."""
SECRETS = {
    name: secrets.token_hex(20)
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "PROD_S3_CHECKPOINT_SECRET_ACCESS_KEY",
        "REMOTE_REWARD_TOKEN",
        "WANDB_API_KEY",
    )
}
"""What the worker has in its environment, and so all flows and stages."""


@pytest.fixture(scope="module")
def deployed(prefect_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """The commands of docs/prefect.md: pools, all deployments, a worker."""
    environment = prefect_environment | SECRETS | {"WANDB_MODE": "offline"}
    deployed = Deployed(tmp_path_factory.mktemp("deployed"), environment)
    deployed.set_up(gpus=2)
    yield deployed
    deployed.close()


@pytest.fixture
def begun(deployed: Deployed) -> Deployed:
    """An empty store."""
    shutil.rmtree(deployed.store, ignore_errors=True)
    return deployed


def wait_until(deployed: Deployed, happened: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    assert eventually(happened, timeout_s), deployed.said


def require_nothing_left(deployed: Deployed) -> None:
    """Soon: after a crash the worker itself starts one more process, for the flow's hooks."""
    gone = eventually(lambda: not deployed.leftovers(), GONE_TIMEOUT_S)
    assert gone, [process.cmdline() for process in deployed.leftovers()]


def test_every_deployment_is_on_the_server_and_refuses_what_it_does_not_know(deployed: Deployed):
    for flow, names in NAMES.items():
        for name in names:
            found = deployed.deployment(f"{flow}/{name}")
            assert found["enforce_parameter_schema"]
            assert all(entry.get("description") for entry in found["parameter_openapi_schema"]["properties"].values())
    assert "'nope'" in deployed.prefect("deployment", "run", "ddrl/2b", "-pnope=1", expect=1)
    path = f"/deployments/{deployed.deployment('ddrl/2b')['id']}/create_flow_run"
    refused = deployed.api.post(path, json={"parameters": {"iterations": 0}})
    assert (refused.status_code, "less than the minimum" in refused.text) == (httpx.codes.CONFLICT, True), refused.text


def test_a_deployment_keeps_its_model_whatever_else_is_changed(deployed: Deployed):
    later = {"type": "SCHEDULED", "state_details": {"scheduled_time": "2100-01-01T00:00:00Z"}}
    changed = {"iterations": 1, "overrides": ["train.seed=1"], "run_id": "mine"}
    path = f"/deployments/{deployed.deployment('ddrl/14b')['id']}/create_flow_run"
    made = deployed.ask("POST", path, {"parameters": changed, "state": later})
    deployed.ask("DELETE", f"/flow_runs/{made['id']}")
    refused = deployed.api.post(path, json={"parameters": {"recipe": ""}, "state": later})
    assert (refused.status_code, "should be non-empty" in refused.text) == (httpx.codes.CONFLICT, True)
    kept = {"recipe": "package:ddrl/14b", "cluster": "package:eight-gpus-14b"}
    assert made["parameters"] == changed | kept


def test_infra_init_may_be_given_again(deployed: Deployed):
    queue = deployed.ask("GET", "/work_pools/cosmos/queues/checks")
    deployed.ask("PATCH", "/work_pools/cosmos/queues/checks", {"priority": 7})
    with temporary_settings({PREFECT_API_URL: deployed.environment["PREFECT_API_URL"]}):
        assert "global concurrency limit 'gpus' of 3" in [*pools.set_up(3, "process").lines()]
        assert deployed.ask("GET", "/v2/concurrency_limits/gpus")["limit"] == 3
        lines = [*pools.set_up(None, "process").lines()]
    assert "global concurrency limit 'gpus' of 3" in lines
    assert "queue 'checks' with priority 1" in lines
    assert deployed.ask("GET", "/work_pools/cosmos/queues/checks")["priority"] == queue["priority"] == 1


def test_a_killed_flow_is_retried_where_it_stopped_and_says_what_became_of_it(begun: Deployed, reference: Flows):
    shutil.copytree(reference.store, begun.store)
    begun.forget(REWARD)
    flow_run = begun.schedule("nft/tiny-nft", begun.parameters())
    wait_until(begun, lambda: begun.markers(REWARD, 0))
    before = begun.manifests()
    begun.flow_process().kill()
    begun.wait(flow_run, "CRASHED")
    require_nothing_left(begun)
    assert begun.manifests() == before
    begun.prefect("flow-run", "retry", flow_run)
    begun.wait(flow_run, "COMPLETED")
    require_untouched(begun, before)
    require_same_run(begun, reference)
    wait_until(begun, lambda: len(begun.task_names(flow_run, "Skipped")) >= 2)  # told by events
    # Artifacts after the wave that was killed, and before it.
    after, earlier = sorted(begun.task_names(flow_run, "Skipped"))
    assert after.endswith(" to report")
    assert earlier.startswith("policy to ")
    wait_until(begun, lambda: any("/reward" in name for name in begun.task_names(flow_run, "Completed")))
    found = begun.ask("GET", f"/flow_runs/{flow_run}")
    assert found["name"] == RUN_ID
    assert {"nft", "sd3", PROJECT} <= set(found["tags"])
    assert found["state"]["message"] == f"{ITERATIONS} iterations, nothing held out"


@pytest.mark.slow
def test_a_cancelled_run_ends_soon_and_goes_on(begun: Deployed):
    flow_run = begun.schedule("nft/tiny-nft", begun.parameters(iterations=9))
    wait_until(begun, lambda: begun.markers(REWARD, 0))
    begun.prefect("flow-run", "cancel", flow_run)
    began_s = time.monotonic()
    begun.wait(flow_run, "CANCELLED")
    require_nothing_left(begun)
    assert time.monotonic() - began_s < CANCEL_TIMEOUT_S
    before = begun.manifests()
    begun.prefect("flow-run", "retry", flow_run)
    wait_until(begun, lambda: len(begun.manifests()) > len(before))
    require_untouched(begun, before)
    begun.prefect("flow-run", "cancel", flow_run)
    begun.wait(flow_run, "CANCELLED")


@pytest.mark.slow
def test_a_suspended_run_ends_its_stage_and_a_paused_one_starts_none_until_resumed(begun: Deployed, reference: Flows):
    flow_run = begun.schedule("nft/tiny-nft", begun.parameters())
    wait_until(begun, lambda: begun.markers(REWARD, 0))
    begun.halt(flow_run, "Suspended")
    require_nothing_left(begun)
    assert begun.state(flow_run)["name"] == "Suspended"
    assert begun.task_states(flow_run)["Running"] == 0
    before = begun.manifests()
    begun.ask("POST", f"/flow_runs/{flow_run}/resume")
    wait_until(begun, lambda: begun.markers("iterations/0002/rollout", 0))
    begun.halt(flow_run, "Paused")
    wait_until(begun, lambda: "paused in Prefect" in begun.logs(flow_run))
    paused = begun.manifests()
    time.sleep(PAUSED_S)
    assert begun.manifests() == paused
    assert begun.state(flow_run)["name"] == "Paused"
    begun.ask("POST", f"/flow_runs/{flow_run}/resume")
    begun.wait(flow_run, "COMPLETED")
    require_untouched(begun, before)
    require_same_run(begun, reference)


@pytest.mark.slow
def test_a_second_flow_run_on_a_run_is_refused(begun: Deployed, reference: Flows):
    shutil.copytree(reference.store, begun.store)
    with begun.planned.lease():
        second = begun.schedule("nft/tiny-nft", begun.parameters())
        assert "another process works on" in begun.wait(second, "FAILED")["message"]
    assert begun.wait(begun.schedule("nft/tiny-nft", begun.parameters()), "COMPLETED")


@pytest.mark.slow
def test_the_log_of_a_stage_that_is_killed_at_every_try_is_short(begun: Deployed):
    parameters = begun.parameters(iterations=1, overrides=["launch.mode=cold", "launch.max_attempts=4"])
    flow_run = begun.schedule("nft/tiny-nft", parameters)

    def failed() -> bool:
        for process in begun.processes():
            with suppress(psutil.NoSuchProcess):
                if any("cosmos-flows-update-" in word for word in process.cmdline()):
                    process.kill()
        return begun.state(flow_run)["type"] == "FAILED"

    wait_until(begun, failed)
    assert begun.state(flow_run)["message"].startswith("iteration-0000/update ended (killed")
    wait_until(begun, lambda: "exited with unexpected exception" in begun.logs(flow_run))
    said = begun.logs(flow_run)
    assert said.count("Traceback (most recent call last)") == 1
    assert len(said.splitlines()) < LOG_LINES


@pytest.mark.slow
def test_the_run_of_the_page_is_named_by_its_flow_run_whose_retry_goes_on_with_it(deployed: Deployed, tmp_path: Path):
    options = ["-pstore=" + str(tmp_path), "-piterations=1", '-poverrides=["validation.n_generation=1"]']
    said = deployed.prefect("deployment", "run", "ddrl/tiny-ddrl", *options, "--watch")
    (flow_run,) = re.findall(r"UUID: (\S+)", said)
    run_id = f"ddrl-tiny-{flow_run[-8:]}"
    assert run_id in said
    assert re.fullmatch(r"ocr 0\.\d{3} -> 0\.\d{3}", deployed.state(flow_run)["message"])

    def manifests() -> set[str]:
        return {
            str(path.relative_to(tmp_path / "runs" / run_id)) for path in tmp_path.rglob("runs/*/**/manifest.*.json")
        }

    before = manifests()
    again = ("rerun", run_id, "--stage", "reward-ocr", "--iteration", "0", "--store", str(tmp_path))
    assert "retry its flow run" in deployed.start_command("flows", *again).finish()
    deployed.prefect("flow-run", "retry", flow_run)
    deployed.wait(flow_run, "COMPLETED")
    assert manifests() - before == {"iterations/0000/reward-ocr/manifest.2.json"}
    # Artifacts before the wave of the rewards, and after it.
    skipped = 2
    # States of tasks reach the server later than the flow's, by another way.
    wait_until(deployed, lambda: deployed.task_states(flow_run)["Skipped"] == skipped, GONE_TIMEOUT_S)


@pytest.mark.slow
def test_a_flow_whose_worker_alone_was_killed_goes_on_to_its_end(begun: Deployed, reference: Flows):
    flow_run = begun.schedule("nft/tiny-nft", begun.parameters())
    wait_until(begun, lambda: begun.markers(REWARD, 0))
    assert begun.prefect_worker is not None
    begun.prefect_worker.kill()
    begun.prefect_worker.wait()
    begun.start_worker()
    begun.wait(flow_run, "COMPLETED")
    require_nothing_left(begun)
    require_same_run(begun, reference)


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_too_goes_on_by_its_run_id(begun: Deployed, reference: Flows):
    silent = begun.schedule("nft/tiny-nft", begun.parameters())
    wait_until(begun, lambda: begun.markers(REWARD, 0))
    before = begun.manifests()
    flow = begun.flow_process()
    assert begun.prefect_worker is not None
    os.kill(begun.prefect_worker.pid, signal.SIGKILL)
    flow.kill()
    begun.prefect_worker.wait()
    require_nothing_left(begun)
    begun.start_worker()
    begun.wait(begun.schedule("nft/tiny-nft", begun.parameters()), "COMPLETED")
    require_untouched(begun, before)
    require_same_run(begun, reference)
    # By the automation, since nobody is left who could say so; then it can be retried.
    assert begun.state(silent)["type"] == "RUNNING"
    assert "no heartbeat" in begun.wait(silent, "CRASHED", timeout_s=NOTICED_S)["message"]
    begun.prefect("flow-run", "retry", silent)
    begun.wait(silent, "COMPLETED")
    require_same_run(begun, reference)


@pytest.mark.slow
def test_one_stage_is_made_again(begun: Deployed, reference: Flows):
    shutil.copytree(reference.store, begun.store)
    before = begun.manifests()
    options = [f"-pstore={begun.store}", f"-prun_id={RUN_ID}", "-pstage=reward-ocr", "-piteration=1"]
    begun.prefect("deployment", "run", "stage/run", *options, "--watch")
    assert begun.manifests() == before
    begun.prefect("deployment", "run", "stage/run", *options, "-pforce=true", "--watch")
    (new,) = begun.manifests().keys() - before.keys()
    assert new == f"{REWARD}/manifest.2.json"
    require_untouched(begun, {path: data for path, data in before.items() if not path.startswith(REWARD)})


@pytest.mark.slow
def test_a_fork_is_deployed(begun: Deployed, reference: Flows):
    shutil.copytree(reference.store, begun.store)
    before = begun.manifests()
    options = [f"-pstore={begun.store}", f"-prun={RUN_ID}", "-pat=1", "-prun_id=fork"]
    begun.prefect("deployment", "run", "fork/runs", *options, "--watch")
    assert begun.manifests() == before
    slot = f"{begun.store}/runs/fork/iterations/0000/update"
    assert made(slot).slot == str(begun.root / "iterations/0000/update")


@pytest.mark.slow
def test_a_schedule_fires(deployed: Deployed, tmp_path: Path):
    check = deployed.deployment("infra/check")
    every = {"schedule": {"interval": 20}, "active": True, "parameters": {"store": str(tmp_path)}}
    (made,) = deployed.ask("POST", f"/deployments/{check['id']}/schedules", [every])
    by_schedule = {
        "deployments": {"id": {"any_": [check["id"]]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED"]}}},
    }

    def ended() -> list[dict[str, object]]:
        return deployed.ask("POST", "/flow_runs/filter", by_schedule)

    try:
        wait_until(deployed, ended)
    finally:
        deployed.ask("DELETE", f"/deployments/{check['id']}/schedules/{made['id']}")
    (flow_run, *_) = ended()
    assert flow_run["auto_scheduled"]
    assert flow_run["state_type"] == "COMPLETED", deployed.said
    assert store.size(str(tmp_path / ".check")) is None or not list((tmp_path / ".check").glob("*/data"))


def test_a_dataset_is_prepared_by_hand_and_by_an_event(deployed: Deployed, tmp_path: Path):
    made = deployed.schedule("preprocess/tiny", {"store": str(tmp_path)})
    deployed.wait(made, "COMPLETED")
    (row,) = json.loads(artifact_of(deployed, "dataset-tiny")["data"])
    assert (row["new"], row["changed"], row["removed"], row["damaged"], row["bytes"] > 0) == (32, 0, 0, 0, True)
    assert artifact_of(deployed, "dataset-tiny-progress")["data"] == 100
    key = f"file://{tmp_path}/dataset/tiny"
    wait_until(deployed, lambda: key in str(deployed.events(made, "prefect.asset.materialization.succeeded")))
    deployed.start_command("flows", "infra", "init", "--prepare", "preprocess/local").finish()
    by_event = {"deployments": {"id": {"any_": [deployed.deployment("preprocess/local")["id"]]}}}
    (schedule,) = deployed.deployment("preprocess/local")["schedules"]
    assert not schedule["active"]
    assert deployed.ask("POST", "/flow_runs/filter", by_event) == []
    deployed.emit(FILES_CHANGED, "cosmos-flows.dataset.other")
    deployed.prefect("event", "emit", FILES_CHANGED, "--resource-id", "cosmos-flows.dataset.local")
    wait_until(deployed, lambda: deployed.ask("POST", "/flow_runs/filter", by_event))
    (flow_run,) = deployed.ask("POST", "/flow_runs/filter", by_event)
    # There is no such folder.
    assert "no folder at datasets/clips" in deployed.wait(flow_run["id"], "FAILED")["message"]


def artifact_of(deployed: Deployed, key: str) -> dict[str, Any]:
    """The newest artifact with a key."""
    return deployed.ask("GET", f"/artifacts/{key}/latest")


def test_no_secret_of_the_worker_is_in_what_all_these_runs_left(
    deployed: Deployed, prefect_environment: dict[str, str]
) -> None:
    home = Path(prefect_environment["PREFECT_HOME"])
    places = (home, deployed.folder)
    # Parameters and logs are in the database, for one.
    assert any(path.parent == home for path in files_with(deployed.store, *places))
    for name, secret in SECRETS.items():
        found = [path for path in files_with(secret, *places) if path.parent not in deployed.environments()]
        assert found == [], name
