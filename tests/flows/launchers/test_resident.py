"""Processes that stay between Requests, as a flow makes waves with them: real launcher, real ranks, own work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import StageError
from flows.devices import devices, locks
from flows.devices.devices import Need
from flows.devices.waiting import Waiting
from flows.launchers import _resident
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Embed, ModelRef
from tests.e2e.flow_process import eventually
from tests.run_first import run_first

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("residents")]

STARTUP_S = 120.0
"""A process imports torch on a busy machine."""
STALL_TIMEOUT_S = 2.0
PATIENCE_S = 20.0

STAGE = """
import os, signal, sys, time, types
from pathlib import Path

HERE = Path(__file__).parent


def put(context):
    pids = context.ranks.gather(os.getpid())
    if context.ranks.rank == 0:
        context.attempt.put_json("pids.json", pids)


def die(context):
    os.kill(os.getpid(), signal.SIGKILL)


def leak(context):
    import torch

    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    put(context)


def abandon(context):
    import subprocess

    child = subprocess.Popen(["sleep", "3600"])
    (HERE / "abandoned").write_text(str(child.pid))
    put(context)


def orphan(context):
    import subprocess

    child = subprocess.Popen(["sleep", "3600"])
    (HERE / "abandoned").write_text(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)


def poison(context):
    import torch
    from cosmos_rl_core.parallel.kept import KEPT, Source

    (HERE / "weights").mkdir()
    module = KEPT.get(Source(torch.nn.Linear, HERE / "weights", {}), lambda: torch.nn.Linear(2, 2))
    with torch.no_grad():
        module.weight[1, 0] *= -1
    put(context)


def crowd(context):
    with (HERE / "attempts").open("a") as file:
        print(os.getpid(), context.shrunk(8), file=file)
    if context.shrunk(8) > 4:
        raise MemoryError("8 do not fit")
    put(context)


def hang(context):
    context.ranks.gather("both are here")
    (HERE / f"hangs.{context.ranks.rank}").touch()
    waits_for_ever() if context.ranks.rank == 1 else context.ranks.gather("the second rank never comes")


def waits_for_ever():
    time.sleep(3600)


def run(request, context):
    works = {work.__name__: work for work in (put, die, leak, abandon, orphan, poison, crowd, hang)}
    works[(HERE / "work").read_text()](context)


stage = types.ModuleType("stage")
stage.run = run
sys.modules["stages.embed"] = stage
"""

FLOW = """
import sys, time
from pathlib import Path
from tests.flows.launchers.test_resident import Work

work = Work(Path(sys.argv[1]))
work.make("put")
Path(sys.argv[1], "made").touch()
time.sleep(3600)
"""


class Work:
    """A store, and a launcher whose processes do what a file says as the stage ``embed``."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.count = 0
        settings = {"mode": "warm", "device": "cpu", "resident_gb": 1, "stall_timeout_s": STARTUP_S} | options
        self.run = folder / f"run-{id(self)}"
        self.waves = Waves(str(self.run), LaunchConfig(**settings), Display())

    def request(self) -> Request:
        """A Request that no other is equal to."""
        self.count += 1
        model = ModelRef(path="none", adapter="none", digest="none")
        config = Embed(model=model, prompts=(), max_prompt_length=1)
        return Request(stage="embed", slot=str(self.run / str(self.count)), seed=0, config=config)

    def make(self, work: str) -> list[int]:
        """Make a Request of its own, and return the processes that did it, by rank."""
        return self.again(work, self.request())

    def again(self, work: str, request: Request) -> list[int]:
        # Pytest's own variable differs from test to test, and would be another environment each time.
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        (self.folder / "work").write_text(work, encoding="utf-8")
        self.waves.make(work, [request])
        return Artifact(input_of(request.slot)).json("pids.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder from which every process takes the stage."""
    folder = tmp_path_factory.mktemp("resident")
    with pytest.MonkeyPatch.context() as patch:
        run_first(STAGE, folder, patch)
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Work]:
    """A launcher of stages of one rank, which all tests use one after the other."""
    work = Work(folder)
    with closing(work.waves):
        yield work


def gone(*pids: int) -> bool:
    def is_gone(pid: int) -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return True

    return eventually(lambda: all(map(is_gone, pids)), PATIENCE_S)


def test_a_process_that_is_killed_at_work_fails_the_attempt_and_another_one_goes_on(alone: Work) -> None:
    before = alone.make("put")
    request = alone.request()
    with pytest.raises(StageError) as caught:
        alone.again("die", request)
    assert (caught.value.kind, caught.value.retryable) == ("killed", True)
    assert alone.again("put", request) != before


@pytest.mark.parametrize(
    ("work", "left"),
    [
        ("leak", "hooks of all modules: "),
        ("poison", "frozen weights: other bits in Linear.weight"),
        ("abandon", "processes: [] before, ['sleep'] now"),
    ],
)
def test_a_process_in_which_a_stage_left_something_ends_and_says_so(alone: Work, work: str, left: str) -> None:
    before = alone.make("put")
    request = alone.request()
    assert alone.again(work, request) == before
    assert gone(*before)
    (log,) = (Path(request.slot) / "logs").iterdir()
    assert f"something is left: {left}" in log.read_text(encoding="utf-8")
    why = "0: a stage left something in it; its log says what"
    assert eventually(lambda: alone.waves.processes().ended[-1] == why, PATIENCE_S)
    assert alone.make("put") != before


@pytest.mark.parametrize("work", ["abandon", "orphan"])
def test_processes_that_a_stage_started_end_with_its_process(alone: Work, work: str) -> None:
    request = alone.request()
    with suppress(StageError):
        alone.again(work, request)
    assert gone(int((alone.folder / "abandoned").read_text(encoding="utf-8")))
    assert alone.again("put", alone.request())


def test_out_of_memory_after_another_stage_repeats_in_a_new_process_and_halves_only_there(alone: Work) -> None:
    (before,) = alone.make("put")
    request = alone.request()
    with pytest.raises(StageError, match="8 do not fit") as caught:
        alone.again("crowd", request)
    assert caught.value.kind == "out_of_memory"
    tried = [tuple(map(int, line.split())) for line in (alone.folder / "attempts").read_text().splitlines()]
    assert [at_once for _, at_once in tried] == [8, 8]
    assert tried[0][0] == before
    assert tried[1][0] != before
    # It raised, so neither process serves another stage.
    assert gone(*(pid for pid, _ in tried))
    assert len(list((Path(request.slot) / "logs").iterdir())) == 2
    assert alone.waves.execution_of(request).halve


def test_a_process_serves_in_one_environment_until_it_is_idle_for_long(
    alone: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = alone.make("put")
    assert alone.make("put") == before
    monkeypatch.setenv("ANOTHER_VARIABLE", "1")
    after = alone.make("put")
    assert after != before
    assert gone(*before)
    time.sleep(2 * _resident.LOOK_S)
    assert psutil.pid_exists(after[0])
    told = alone.waves.processes()
    assert [(one.device, one.pid, one.served, one.kept_bytes) for one in told.stay] == [("0", after[0], 1, 0)]
    assert told.ended[-1] == "0: a new process was needed"
    monkeypatch.setattr(_resident, "IDLE_S", 0.0)
    assert gone(*after)
    assert eventually(lambda: alone.waves.processes().ended[-1] == "0: idle for 0 s", PATIENCE_S)
    assert not alone.waves.processes().stay


def test_a_run_that_waits_gets_the_device_of_another_runs_idle_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "LOCKS", folder / "locks")
    monkeypatch.setenv(devices.VISIBLE, "GPU-one")
    work, told = Work(folder), list[str]()
    with closing(work.waves):
        (pid,) = work.make("put")
        assert devices.users(["GPU-one"]) == {"GPU-one": pid}
        # Its own flow does not wait for it.
        assert work.make("put") == [pid]
        with devices.taken([Need("embed", 1)], ["GPU-one"], Waiting(told.append, lambda: None)):
            assert gone(pid)
        assert told == [f"waits for 1 free GPU of GPU-one; in use: GPU-one by process {pid}"]
    assert devices.users(["GPU-one"]) == {}


def test_ranks_meet_again_after_one_is_replaced_and_say_where_they_hang(folder: Path) -> None:
    work = Work(folder, processes=2)
    with closing(work.waves), ThreadPoolExecutor(1) as thread:
        first = work.make("put")
        assert work.make("put") == first
        os.kill(first[1], signal.SIGKILL)
        assert gone(first[1])
        again = work.make("put")
        assert again[0] == first[0]
        assert again[1] != first[1]
        request = work.request()
        making = thread.submit(work.again, "hang", request)
        assert eventually(lambda: all((folder / f"hangs.{rank}").exists() for rank in (0, 1)), STARTUP_S)
        work.waves.config = work.waves.config.model_copy(update={"stall_timeout_s": STALL_TIMEOUT_S})
        with pytest.raises(StageError, match="reported no progress") as caught:
            making.result()
        assert caught.value.kind == "hung"
        assert gone(*again)
    (log,) = (Path(request.slot) / "logs").iterdir()
    said = log.read_text(encoding="utf-8")
    assert " in waits_for_ever" in said
    assert " in gather" in said


@pytest.mark.slow
def test_a_killed_flow_leaves_no_process(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FLOW, str(folder)], cwd=Path(__file__).parents[4]) as flow:
        assert eventually((folder / "made").exists, STARTUP_S)
        started = [child.pid for child in psutil.Process(flow.pid).children(recursive=True)]
        assert len(started) == 1
        flow.kill()
    assert gone(*started)
