"""Whatever is killed, and whenever: the same command again ends with the bytes of a run that nobody interrupted."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.processes import PARENT
from stages.artifacts.slots import current_of
from tests.e2e.conftest import TWO_RANKS
from tests.e2e.flow_process import (
    AFTER_LAST_UPDATE,
    COLD,
    FORK_SERVER,
    MARK,
    Flows,
    Started,
    eventually,
    require_same_run,
    require_untouched,
)

LAST_ROLLOUT = "iterations/0002/rollout"
REWARD = "iterations/0001/reward-ocr"
LAST_SHARD = 3
NO_RETRY = ("--set", "launch.max_attempts=1")


@pytest.mark.slow
def test_a_killed_rank_and_a_killed_torchrun_are_tried_again_with_the_same_result(
    reference_on_two_ranks: Flows, copy_of: Callable[[Flows], Flows]
) -> None:
    flows = copy_of(reference_on_two_ranks)
    flows.forget("iterations/0002/update")
    before = flows.manifests()
    run = flows.start(*TWO_RANKS, "--set", "launch.max_attempts=3")

    run.wait_until(lambda: flows.phases("update", "training"))
    (first,) = flows.phases("update", "training")
    flows.ranks()[1].kill()
    # Sooner than in the second training, and harder: its ranks may not have asked yet to die with it.
    run.wait_until(lambda: set(flows.phases("update", "starting")) - {first})
    workers = flows.ranks()
    flows.torchrun().kill()
    assert eventually(lambda: not any(worker.is_running() for worker in workers.values()), 10)

    assert run.finish().count("another attempt follows: iteration-0002/update ") == 2
    assert len(list((flows.root / "iterations/0002/update/logs").iterdir())) == 3
    require_untouched(flows, before)
    require_same_run(flows, reference_on_two_ranks)
    assert flows.nothing_is_left()


def test_a_flow_killed_inside_a_shard_of_a_rollout_goes_on_from_the_finished_shards(
    flows: Flows, reference: Flows
) -> None:
    before = _killed_inside_the_last_rollout(flows)
    assert flows.manifests() == before
    said = flows.run(*COLD)
    assert "of an earlier attempt adopted" in said
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert flows.nothing_is_left()


def _killed_inside_the_last_rollout(flows: Flows) -> dict[str, bytes]:
    """Kill a flow between the first and the last shard of a rollout, and return the manifests from before.

    On a busy machine the kill may come after the last shard: then once more.
    """
    for _ in range(10):
        flows.forget(LAST_ROLLOUT)
        before = flows.manifests()
        run = flows.start()
        run.wait_until(lambda: flows.markers(LAST_ROLLOUT, 0))
        run.kill()
        assert flows.nothing_is_left()
        if not flows.markers(LAST_ROLLOUT, LAST_SHARD):
            return before
    raise AssertionError("each of ten kills came after the last shard")


def _killed_while_it_scores(
    flows: Flows, victim: Callable[[Started], psutil.Process], *arguments: str
) -> tuple[Started, dict[str, bytes]]:
    """Start a command, kill a process of it after the first shard of scores, and return it and the manifests before.

    On a busy machine the kill may come after the last shard: then once more.
    """
    for _ in range(10):
        flows.forget(REWARD)
        before = flows.manifests()
        run = flows.start(*arguments)
        run.wait_until(lambda: flows.markers(REWARD, 0))
        with contextlib.suppress(psutil.NoSuchProcess, ValueError):
            killed = victim(run)
            killed.kill()
            killed.wait(10)
        if flows.manifests() == before:
            return run, before
        run.finish()
    raise AssertionError("each of ten kills came after the last shard")


def test_a_cold_stage_killed_without_a_retry_fails_the_command_and_the_next_one_goes_on(
    flows: Flows, reference: Flows
) -> None:
    def stage(_: Started) -> psutil.Process:
        (found,) = [process for process in flows.processes() if "stages.execution.runner" in process.cmdline()]
        return found

    run, before = _killed_while_it_scores(flows, stage, *COLD, *NO_RETRY)
    assert "iteration-0001/reward-ocr ended (killed, exit code -9)" in run.finish(expect=70)
    assert flows.nothing_is_left()
    assert flows.manifests() == before
    assert "of an earlier attempt adopted" in flows.run(*COLD, *NO_RETRY)
    require_untouched(flows, before)
    require_same_run(flows, reference)


def test_a_flow_killed_right_after_an_invalidation_makes_the_next_generation(flows: Flows, reference: Flows) -> None:
    _, manifest = current_of(str(flows.root / REWARD))
    assert manifest is not None
    flows.forget(f"{REWARD}/{manifest.files['scores.parquet'].path}")
    before = flows.manifests()
    run = flows.start(*COLD)
    run.wait_until(lambda: (flows.root / REWARD / "invalidated.1.json").exists())
    run.kill()

    assert flows.nothing_is_left()
    assert flows.manifests() == before
    flows.run(*COLD)
    after = flows.manifests()
    assert set(after) - set(before) == {f"{REWARD}/manifest.2.json"}
    assert {path: after[path] for path in before} == before
    require_same_run(flows, reference)
    assert flows.nothing_is_left()


def test_a_killed_fork_server_is_replaced_and_its_stage_tried_again(flows: Flows, reference: Flows) -> None:
    def server(run: Started) -> psutil.Process:
        (found,) = flows.fork_servers(run)
        return found

    run, before = _killed_while_it_scores(flows, server)
    said = run.finish()
    assert "iteration-0001/reward-ocr ended (killed, exit code -9)" in said
    assert "of an earlier attempt adopted" in said
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert flows.nothing_is_left()


def test_a_flow_killed_while_its_fork_server_starts_leaves_no_process(flows: Flows) -> None:
    flows.forget(REWARD)
    run = flows.start()
    run.wait_until(lambda: flows.running(FORK_SERVER))
    run.kill()
    # Soon, whatever it imports at the moment.
    assert eventually(lambda: not flows.processes(), 3)


def test_a_process_whose_parent_died_before_it_could_ask_to_die_with_it_ends_at_once(tmp_path: Path) -> None:
    mark = str(tmp_path)
    command = [sys.executable, "-m", "cosmos_rl_core.processes", "sleep", "60"]
    program = (
        "import os, subprocess\n"
        f"subprocess.Popen({command!r}, env=os.environ | {{{PARENT!r}: str(os.getpid())}})\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {MARK: mark})
    time.sleep(0.5)
    assert eventually(lambda: not _marked(mark), 10)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
def test_a_cold_run_from_nothing_has_the_bytes_of_a_warm_one(
    reference: Flows, prefect_environment: dict[str, str], tmp_path: Path
) -> None:
    flows = Flows(tmp_path, prefect_environment)
    flows.run(*COLD)
    require_same_run(flows, reference)
    assert flows.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["cold", "warm"])
def test_flows_killed_at_random_moments_end_with_the_same_bytes(
    seed: int, mode: str, reference: Flows, prefect_environment: dict[str, str], tmp_path: Path
) -> None:
    flows = Flows(tmp_path, prefect_environment)
    options = ("--set", f"launch.mode={mode}")
    moments = random.Random(seed)
    for _ in range(5):
        before = flows.manifests()
        run = flows.start(*options)
        try:
            run.process.wait(moments.uniform(5, 30))
        except subprocess.TimeoutExpired:
            run.kill()
        assert flows.nothing_is_left()
        require_untouched(flows, before)
    before = flows.manifests()
    flows.run(*options)
    require_untouched(flows, before)
    require_same_run(flows, reference)
    assert flows.nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_any_process_of_two_ranks_killed_at_random_moments_leaves_the_same_bytes(
    seed: int, reference_on_two_ranks: Flows, copy_of: Callable[[Flows], Flows]
) -> None:
    flows = copy_of(reference_on_two_ranks)
    flows.forget("iterations/0002/update", *AFTER_LAST_UPDATE)
    before = flows.manifests()
    moments = random.Random(seed)
    for _ in range(4):
        run = flows.start(*TWO_RANKS)
        run.wait_until(lambda: len(flows.processes()) > 1 or (flows.root / "iterations/0002/update").exists())
        time.sleep(moments.uniform(0, 12))
        victims = sorted(flows.processes(), key=lambda process: process.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            for victim in moments.sample(victims, min(1, len(victims))):
                victim.kill()
        run.process.wait(300)
        assert flows.nothing_is_left()
    flows.run(*TWO_RANKS)
    require_untouched(flows, before)
    require_same_run(flows, reference_on_two_ranks)
