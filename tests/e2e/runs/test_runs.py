"""Commands on a finished run, stages by hand, and what is refused when a run goes on otherwise than it began."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.planning import requests
from stages.artifacts.generations import invalidate
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from stages.execution.execution import Execution
from tests.e2e.flow_process import (
    COLD,
    ITERATIONS,
    ROOT,
    RUN_ID,
    Flows,
    Started,
    require_same_run,
    require_untouched,
)
from tests.hand_made import rewards

REWARD = "iterations/0002/reward-ocr"
ROLLOUT = "iterations/0002/rollout"
TWO_THREADS = ("--set", "launch.threads=2")


def by_hand(flows: Flows, request: Request, threads: int = 1) -> Started:
    """``python -m stages.execution.runner request.json``."""
    path = flows.folder / f"{request.stage}.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    Execution(threads=threads).write(path)
    return flows.start_command("stages.execution.runner", str(path))


def reward_of(flows: Flows) -> Request:
    """The request for the last iteration's scores."""
    (request,) = rewards(flows.planned, str(flows.root / ROLLOUT), ITERATIONS - 1)
    return request


@pytest.mark.usefixtures("with_prefect")
def test_a_run_prints_as_json_what_its_status_says_and_its_progress_to_stderr(flows: Flows) -> None:
    flows.forget(REWARD)
    place = ("--store", flows.store, "--json")
    command = [sys.executable, "-m", "flows", "run", flows.recipe, "--run-id", RUN_ID, *place]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=flows.directory, env=flows.environment
    )
    assert ended.returncode == 0, ended.stderr
    assert "iteration-0002/reward-ocr" in ended.stderr
    status = [sys.executable, "-m", "flows", "status", RUN_ID, *place]
    said = subprocess.run(status, capture_output=True, check=True, cwd=flows.directory, env=flows.environment).stdout
    found = json.loads(ended.stdout)
    assert found == json.loads(said)
    assert (found["state"], found["standing"]) == ("finished", len(found["stages"]))


def test_a_rerun_stage_is_made_again_and_equal_artifacts_that_read_it_stay(flows: Flows, reference: Flows) -> None:
    before = flows.manifests()
    assert "iteration-0002/update" in flows.command("rerun", "--iteration", "2", "--stage", "reward-ocr")
    assert "invalidated" in flows.command("status")
    flows.run(*COLD)

    assert '"generation": 2' in flows.command("status", "--json")
    assert set(flows.manifests()) - set(before) == {f"{REWARD}/manifest.2.json"}
    require_same_run(flows, reference)


def test_a_generation_that_was_ended_gives_no_shards_to_the_next(flows: Flows) -> None:
    request = reward_of(flows)
    invalidate(request.slot, 1, "the scorer was broken")
    by_hand(flows, request).finish(expect=0)
    _, manifest = current_of(request.slot)
    assert manifest is not None
    assert {Path(entry.path).parts[1] for entry in manifest.files.values()} == {manifest.attempt}


def test_an_artifact_that_lost_a_shard_is_made_again(flows: Flows, reference: Flows) -> None:
    request = reward_of(flows)
    _, manifest = current_of(request.slot)
    assert manifest is not None
    flows.forget(f"{REWARD}/{manifest.files['scores/00000.json'].path}")
    assert "scores/00000.json is missing" in by_hand(flows, request).finish(expect=0)
    require_same_run(flows, reference)


def test_a_recipe_edited_between_two_tries_is_refused_by_name(flows: Flows) -> None:
    flows.forget(REWARD)
    before = flows.manifests()
    said = flows.run("--set", "train.optm_lr=2e-3", expect=64)
    assert "train.optm_lr: 0.001 -> 0.002" in said
    require_untouched(flows, before)


@pytest.mark.slow
def test_going_on_under_other_numerics_is_refused_by_name_unless_it_is_allowed(flows: Flows) -> None:
    flows.forget("policy")
    before = flows.manifests()
    said = flows.run(*COLD, *TWO_THREADS, expect=64)
    assert said.count("threads: 1 -> 2") == 1
    assert "--allow-numerics-change" in said
    require_untouched(flows, before)

    assert "allowed change of numerics: threads: 1 -> 2" in flows.run(*COLD, *TWO_THREADS, "--allow-numerics-change")
    _, manifest = current_of(str(flows.root / "policy"))
    assert manifest is not None
    assert manifest.numerics["threads"] == 2


@pytest.mark.slow
def test_one_request_executed_twice_at_once_leaves_one_manifest(flows: Flows, reference: Flows) -> None:
    flows.forget(REWARD)
    request = reward_of(flows)
    processes = [by_hand(flows, request), by_hand(flows, request)]
    for process in processes:
        process.finish(expect=0)
    assert [path.name for path in (flows.root / REWARD).glob("manifest.*.json")] == ["manifest.1.json"]
    require_same_run(flows, reference)


def test_a_stage_by_hand_exits_as_documented(flows: Flows) -> None:
    request = reward_of(flows)
    by_hand(flows, request).finish(expect=0)

    execution = Execution.path_for(flows.folder / "request.json")
    execution.write_text('{"threads": 0}', encoding="utf-8")
    path = flows.folder / "request.json"
    path.write_text(request.model_dump_json(), encoding="utf-8")
    said = flows.start_command("stages.execution.runner", str(path)).finish(expect=64)
    assert "threads" in said
    assert "greater than or equal to 1" in said
    execution.unlink()
    path = flows.folder / "broken.json"
    path.write_text(json.dumps({"stage": "reward"}), encoding="utf-8")
    assert "slot" in flows.start_command("stages.execution.runner", str(path)).finish(expect=64)

    elsewhere = request.model_copy(update={"slot": f"{flows.folder}/broken.json/reward"})
    assert "broken.json/reward" in by_hand(flows, elsewhere).finish(expect=65)

    flows.forget(REWARD)
    _, rollout = current_of(str(flows.root / ROLLOUT))
    assert rollout is not None
    shard = flows.root / ROLLOUT / rollout.files["media/00000.tar"].path
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert "is not what was committed" in by_hand(flows, request).finish(expect=65)


def test_a_full_disk_commits_nothing_and_the_same_request_goes_on_when_there_is_room(
    flows: Flows, reference: Flows
) -> None:
    flows.forget(REWARD)
    request = flows.folder / "request.json"
    request.write_text(reward_of(flows).model_dump_json(), encoding="utf-8")
    # No file may be larger than a kilobyte: the write fails as it does on a disk without room.
    limited = ["bash", "-c", 'ulimit -f 1; exec "$0" -m stages.execution.runner "$1"', sys.executable, str(request)]
    ended = subprocess.run(limited, cwd=ROOT, env=flows.environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 75, ended.stderr
    assert "no space left to write" in ended.stderr
    assert not list((flows.root / REWARD).glob("manifest.*.json"))
    by_hand(flows, reward_of(flows)).finish(expect=0)
    require_same_run(flows, reference)


@pytest.mark.slow
def test_shards_of_other_numerics_are_not_adopted_and_that_is_said(flows: Flows) -> None:
    flows.forget(ROLLOUT)
    request = requests.rollout(flows.planned, ITERATIONS - 1)
    killed = by_hand(flows, request)
    killed.wait_until(lambda: flows.markers(ROLLOUT, 0))
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert not list((flows.root / ROLLOUT).glob("manifest.*.json"))

    said = by_hand(flows, request, threads=2).finish(expect=0)
    assert "not adopted: made under other numerics (threads: 1 -> 2)" in said
    assert "were adopted" not in said
    _, manifest = current_of(str(flows.root / ROLLOUT))
    assert manifest is not None
    assert manifest.numerics["threads"] == 2
    assert {Path(entry.path).parts[1] for entry in manifest.files.values()} == {manifest.attempt}


@pytest.mark.slow
@pytest.mark.usefixtures("with_prefect")
def test_a_run_that_is_interrupted_by_ctrl_c_leaves_no_process(flows: Flows) -> None:
    flows.forget(REWARD)
    run = flows.start(*COLD)
    run.wait_until(lambda: flows.markers(REWARD, 0))
    run.process.send_signal(signal.SIGINT)
    try:
        assert run.process.wait(30) == 130
    except subprocess.TimeoutExpired:
        pytest.fail(f"it did not end:\n{run.said}")
    assert flows.nothing_is_left()
