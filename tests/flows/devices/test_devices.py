"""Devices of a machine: which there are, who has which, and when a lock is freed. No test needs a GPU."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import ConfigError, LeaseError
from flows.devices import devices, locks
from flows.devices.devices import VISIBLE, Need, known_to_driver, visible
from flows.devices.waiting import Waiting
from tests.flows.allocated import Work, wait_until

pytestmark = pytest.mark.processes

TWO_GPUS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa1111-0000)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb2222-0000)
"""
ONE_IS_CUT = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111-0000)
  MIG 3g.20gb     Device  0: (UUID: MIG-cccc3333-0000)
  MIG 3g.20gb     Device  1: (UUID: MIG-dddd4444-0000)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb2222-0000)
"""
SLEEPING_RANK = "import os, sys, time; open(sys.argv[1] + '/' + os.environ['RANK'], 'w').close(); time.sleep(600)"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an ``nvidia-smi`` that lists these devices into the path."""

    def have(listed: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && cat <<'E'\n{listed}E\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return have


@pytest.fixture
def two() -> list[str]:
    """Devices that no other test or run has."""
    mark = secrets.token_hex(8)
    return visible({VISIBLE: f"GPU-{mark}-a,GPU-{mark}-b"})


@pytest.fixture
def started() -> Iterator[list[psutil.Process]]:
    """Processes to kill in the end, with what they started."""
    found: list[psutil.Process] = []
    yield found
    for process in found:
        if process.is_running():
            process.kill()
            process.wait()


def refuse() -> None:
    raise LeaseError("not free")


def is_free(*wanted: str) -> bool:
    try:
        with devices.taken([Need("rollout", len(wanted))], wanted, Waiting(lambda _: None, refuse)):
            return True
    except LeaseError:
        return False


def test_an_inherited_choice_of_devices_is_respected(machine):
    assert visible({}) == []
    assert visible({VISIBLE: "3, 1"}) == ["3", "1"]
    assert visible({VISIBLE: ""}) == visible({VISIBLE: "-1"}) == visible({VISIBLE: "NoDevFiles"}) == []
    assert visible({VISIBLE: "0,-1,1"}) == ["0"]
    machine(TWO_GPUS)
    assert visible({}) == ["GPU-aaaa1111-0000", "GPU-bbbb2222-0000"]
    assert visible({VISIBLE: "1,0"}) == ["GPU-bbbb2222-0000", "GPU-aaaa1111-0000"]
    assert visible({VISIBLE: "1,7,0"}) == ["GPU-bbbb2222-0000"]


def test_one_device_is_the_same_by_index_by_uuid_and_by_the_beginning_of_its_uuid(machine):
    machine(TWO_GPUS)
    for name in ("1", "GPU-bbbb2222-0000", "GPU-bbbb", "1,GPU-bbbb"):
        assert visible({VISIBLE: name}) == ["GPU-bbbb2222-0000"]


def test_parts_of_a_device_are_devices(machine):
    machine(ONE_IS_CUT)
    assert visible({}) == ["MIG-cccc3333-0000", "MIG-dddd4444-0000", "GPU-bbbb2222-0000"]
    assert visible({VISIBLE: "MIG-dddd4444-0000"}) == ["MIG-dddd4444-0000"]


def test_stages_of_a_wave_get_devices_of_their_own_as_indices_of_visible_ones(two):
    with devices.taken([Need("update", 1), Need("rollout", 1, (0,))], two, Waiting(pytest.fail, refuse)) as (
        update,
        rollout,
    ):
        assert rollout.environment[VISIBLE] == two[0]
        assert update.environment[VISIBLE] == two[1]
        assert not is_free(two[0])
        assert not is_free(two[1])
    assert is_free(*two)


def test_a_stage_without_torch_is_shown_no_device_and_locks_none(two):
    with devices.taken([Need("reward", 0)], two, Waiting(pytest.fail, refuse)) as (reward,):
        assert reward.environment[VISIBLE] == ""
        assert is_free(*two)


def test_a_stage_that_cannot_get_all_devices_holds_none_and_names_their_holders_once(two, started):
    told: list[str] = []
    rounds = iter(range(2))

    def check() -> None:
        assert is_free(two[0])
        if next(rounds, None) is None:
            refuse()

    with devices.taken([Need("update", 1, (1,))], two, Waiting(pytest.fail, refuse)) as (share,):
        started.append(psutil.Popen(["sleep", "600"], stdin=share.file))
    with pytest.raises(LeaseError), devices.taken([Need("rollout", 2)], two, Waiting(told.append, check)):
        pass
    listed = ", ".join(two)
    in_use = f"{two[1]} by process {started[0].pid}"
    assert told == [f"waits for 2 free GPUs of {listed}; in use: {in_use}"]
    assert devices.users(two) == {two[1]: started[0].pid}


def test_devices_that_a_run_keeps_are_taken_first_and_others_get_a_lock_each(two):
    with locks.open_locks() as kept:
        assert locks.lock(kept, locks.byte_of(two[1]))
        with devices.taken([Need("embed", 1)], two, Waiting(pytest.fail, refuse), lambda: two[1:]) as (share,):
            assert (share.devices, share.apart) == (two[1:], {})
            assert is_free(two[0])
        with devices.taken([Need("update", 2)], two, Waiting(pytest.fail, refuse), lambda: two[1:]) as (share,):
            assert (share.devices, [*share.apart]) == (two, two[:1])
            assert not is_free(two[0])
        needs = [Need("update", 1), Need("rollout", 1)]
        with devices.taken(needs, two, Waiting(pytest.fail, refuse), lambda: two[1:]) as (update, rollout):
            assert (update.devices, rollout.devices) == (two[1:], two[:1])
        assert is_free(two[0])
        # What was kept is not freed with a share.
        assert not is_free(two[1])


def test_a_run_that_waits_for_devices_says_so_and_first_gives_its_own_back(two):
    said: list[object] = []
    waiting = Waiting(said.append, refuse, lambda: said.append("gives back"))
    assert locks.wanted(two) == []
    with devices.taken([Need("update", 1, (1,))], two, Waiting(pytest.fail, refuse)) as (share,):

        def give_way() -> None:
            said.append(locks.wanted(two))
            share.close()

        waiting.check = give_way
        with devices.taken([Need("rollout", 1, (1,))], two, waiting):
            assert locks.wanted(two) == []
    assert said[1:] == ["gives back", two[1:]]


def test_asking_for_more_than_the_visible_devices_is_a_mistake_that_lists_them(two):
    seen = f"2 visible: {two[0]}, {two[1]}"
    with pytest.raises(ConfigError, match=f"update and rollout need 3 GPUs, one for each process; {seen}"):
        devices.require([Need("update", 1), Need("rollout", 2)], two)
    with pytest.raises(ConfigError, match=f"launch.stage_gpus.rollout has 4, which is no index .*; {seen}"):
        devices.require([Need("rollout", 2, (0, 4))], two)
    devices.require([Need("rollout", 2, (0, 4))], [])


def test_several_ranks_get_whole_devices_only():
    parts = ["MIG-a", "MIG-b", "GPU-a"]
    devices.require([Need("policy", 1)], parts)
    for need in (Need("rollout", 2), Need("rollout", 2, (0, 2))):
        with pytest.raises(ConfigError, match="rollout: 2 processes cannot meet on MIG devices; 3 visible"):
            devices.require([need], parts)
    mark = secrets.token_hex(8)
    mixed = [f"MIG-{mark}", f"GPU-{mark}-a", f"GPU-{mark}-b"]
    with devices.taken([Need("rollout", 2)], mixed, Waiting(pytest.fail, refuse)) as (rollout,):
        assert rollout.devices == mixed[1:]


def test_a_lock_is_freed_when_the_last_process_of_torchrun_is_gone(two, started, tmp_path):
    ranks = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--nproc-per-node", "2"]
    ranks += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--no-python"]
    with devices.taken([Need("update", 2)], two, Waiting(pytest.fail, refuse)) as (share,):
        command = [*ranks, sys.executable, "-c", SLEEPING_RANK, str(tmp_path)]
        torchrun = psutil.Popen(command, stdin=share.file, stderr=subprocess.DEVNULL)
        started.append(torchrun)
    wait_until(lambda: all((tmp_path / rank).exists() for rank in "01"))
    workers = torchrun.children()
    started += workers
    assert len({os.getsid(process.pid) for process in [torchrun, *workers]}) == 3
    for process in (torchrun, workers[1]):
        process.kill()
        process.wait()
        assert not is_free(two[0])
        assert not is_free(two[1])
    workers[0].kill()
    wait_until(lambda: is_free(*two))


class Flow:
    """A flow with one stage on the first visible device, as a process."""

    def __init__(self, work: Work, name: str, shown: str) -> None:
        launch = LaunchConfig(device="cpu", stage_gpus={"report": (0,)}).model_dump_json()
        self.log = work.folder / f"{name}.txt"
        command = [sys.executable, "-m", "tests.flows.allocated", work.run_url, launch]
        with self.log.open("wb") as log:
            environment = os.environ | {VISIBLE: shown}
            self.process = psutil.Popen(
                [*command, work.request(name).model_dump_json()], env=environment, stdout=log, stderr=log
            )

    @property
    def said(self) -> str:
        """Its words, in one line."""
        return " ".join(self.log.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("killed", ["flow", pytest.param("stage", marks=pytest.mark.slow)])
def test_another_run_waits_for_a_device_until_the_stage_of_a_killed_run_is_gone(
    killed, two, started, tmp_path, monkeypatch
):
    work = Work(tmp_path, monkeypatch)
    theirs = Flow(work, "theirs", two[0])
    started.append(theirs.process)
    stage = psutil.Process(int(work.wait_until_ran(1)[0][-1]))
    assert stage.environ()[VISIBLE] == two[0]
    ours = Flow(work, "ours", two[0])
    started.append(ours.process)
    wait_until(lambda: f"waits for 1 free GPU of {two[0]}; in use: {two[0]} by process" in ours.said)
    assert str(stage.pid) in ours.said
    (theirs.process if killed == "flow" else stage).send_signal(signal.SIGKILL)
    stage.wait(20)
    assert [name for name, *_ in work.wait_until_ran(2)] == ["theirs", "ours"]
    work.go()
    assert ours.process.wait(60) == 0, ours.said
    assert ours.said.count("waits for") == 1
    assert is_free(two[0])


def test_without_nvidia_smi_the_driver_tells_the_devices_of_this_container(tmp_path: Path):
    for number, address in enumerate(("0000:0a:00.0", "0000:3b:00.0", "0000:86:00.0")):
        folder = tmp_path / "gpus" / address
        folder.mkdir(parents=True)
        said = f"Model: \t\t H100\nIRQ:   \t\t 16\nGPU UUID: \t GPU-{number}-0000\nDevice Minor: \t {number}\n"
        (folder / "information").write_text(said, encoding="utf-8")
    for number in (2, 1):
        (tmp_path / f"nvidia{number}").touch()
    assert known_to_driver(tmp_path / "gpus", tmp_path) == [["GPU-1-0000"], ["GPU-2-0000"]]
    assert known_to_driver(tmp_path / "none", tmp_path) == []
