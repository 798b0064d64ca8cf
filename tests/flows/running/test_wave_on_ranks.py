"""Two real gloo ranks, under torchrun or as forks, and a real launcher. Only their work is a test's own."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import StageError
from flows.running.display import Display
from flows.running.wave import Waves, place_of
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Embed, ModelRef
from stages.execution.outcome import read_failures
from stages.reporting.contracts import Report
from tests.run_first import python_path, run_first

pytestmark = pytest.mark.processes

STARTUP_S = 90.0
"""Seconds in which torchrun and two ranks import torch on a busy machine."""
STALL_TIMEOUT_S = 3.0
"""Timeout of ranks that have started."""
KILLED_S = 10.0
"""Seconds after which ranks without a GPU are gone."""

STAGE = """
import os, random, signal, sys, threading, time, types
from pathlib import Path
from stages.reporting.contracts import Report

HERE = Path(__file__).parent


def work(group, context):
    import torch

    draw = random.Random(group.rank)
    for turn in range(20):
        time.sleep(draw.uniform(0, 0.03))
        uneven = {"rank": group.rank, "turn": turn, "long": "x" * (1 + 5000 * group.rank * (turn % 3))}
        everyone = group.gather(uneven)
        assert [one["rank"] for one in everyone] == [0, 1], everyone
        assert [len(one["long"]) for one in everyone] == [1, 1 + 5000 * (turn % 3)]
        assert group.broadcast([group.rank, turn]) == [0, turn]
        total = group.all_reduce_sum_(torch.tensor([float(group.rank + 1), turn], dtype=torch.float64))
        assert total.tolist() == [3.0, 2.0 * turn]
        assert group.gather(None) == [None, None]
    assert group.world_size == 2


def put(group, context):
    work(group, context)
    context.attempt.put_json(f"rank-{group.rank}.json", group.world_size)


def fail(group, context):
    work(group, context)
    if group.rank == 1:
        time.sleep(0.5)
        raise ValueError("the second rank says why")
    group.gather("the first rank waits")


def late(group, context):
    if group.rank == 0:
        raise RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:40213")
    time.sleep(1.5)
    raise MemoryError("the second rank says why, later")


def stop(group, context):
    group.gather("both are here")
    context.progress("the last progress", 0, 1)
    group.gather("it was given")
    (HERE / f"pid.{group.rank}").write_text(str(os.getpid()))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.gather("the second rank never comes")


def hang(group, context):
    group.gather("both are here")
    context.progress("the last progress", 0, 1)
    (HERE / f"pid.{group.rank}").write_text(str(os.getpid()))
    waits_for_ever() if group.rank == 1 else group.gather("the second rank never comes")


def waits_for_ever():
    time.sleep(3600)


def die(group, context):
    work(group, context)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.gather("the second rank never comes")


def crowd(group, context):
    if context.shrunk(8) > 4:
        raise MemoryError("8 do not fit")
    context.attempt.put_json("at-once.json", context.shrunk(8))


def abort(group, context):
    print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
    os.abort()


def stuck(group, context):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    print("said before it failed", end="")
    raise ValueError("a thread keeps the interpreter")


def run(request, context):
    works = {"put": put, "fail": fail, "late": late, "stop": stop, "crowd": crowd, "stuck": stuck, "abort": abort}
    works |= {"die": die, "hang": hang}
    works[os.environ["RANKS_TEST"]](context.ranks, context)


stage = types.ModuleType("stage")
stage.run = run
sys.modules["stages.embed"] = sys.modules["stages.report"] = stage
"""


@pytest.fixture
def request_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Request:
    """A request whose stage is ours in every process that the launcher starts."""
    run_first(STAGE, tmp_path, monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    model = ModelRef(path="none", adapter="none", digest="none")
    return Request(
        stage="embed",
        slot=str(tmp_path / "slot"),
        seed=0,
        config=Embed(model=model, prompts=(), max_prompt_length=1),
    )


def launcher_of(request: Request, **options: Any) -> Waves:
    """What a flow makes the request with."""
    return Waves(str(Path(request.slot).parent), LaunchConfig(**options), Display())


def make(request: Request, mode: str) -> None:
    """One try, as a flow makes it, without the flow."""
    with closing(launcher_of(request, processes=2, stall_timeout_s=STARTUP_S, mode=mode)) as launcher:
        launcher.make("ranks", [request])


def test_a_failure_names_stages_as_status_does_and_prepared_data_by_its_digest(request_on_two_ranks: Request):
    request = request_on_two_ranks
    assert place_of(request.model_copy(update={"slot": "store/dataset/" + "0a" * 32})) == "embed 0a0a0a0a0a0a"
    names = {"iterations/0003/update": "iteration-0003/update", "exports/0000/export": "policy-0000/export"}
    for slot, name in names.items():
        assert place_of(request.model_copy(update={"slot": f"store/runs/a/{slot}"})) == name


@pytest.fixture(params=["cold", "warm"])
def mode(request: pytest.FixtureRequest) -> str:
    """How the ranks start: torchrun, or forks."""
    return request.param


@pytest.mark.slow
def test_files_that_two_ranks_write_are_one_artifact(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("RANKS_TEST", "put")
    make(request_on_two_ranks, mode)
    artifact = Artifact(input_of(request_on_two_ranks.slot))
    assert {name: artifact.json(name) for name in artifact.names()} == {"rank-0.json": 2, "rank-1.json": 2}
    assert artifact.manifest.numerics["world_size"] == 2


def test_ranks_exchange_uneven_values_until_one_fails_and_the_failed_one_reports(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("RANKS_TEST", "fail")
    started_s = time.monotonic()
    with pytest.raises(StageError, match="the second rank says why") as caught:
        make(request_on_two_ranks, mode)
    assert caught.value.kind == "crash"
    assert time.monotonic() - started_s < STARTUP_S
    assert not _left(request_on_two_ranks)


def test_a_killed_rank_ends_the_others_and_the_attempt_may_be_repeated(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("RANKS_TEST", "die")
    with pytest.raises(StageError) as caught:
        make(request_on_two_ranks, mode)
    assert (caught.value.kind, caught.value.retryable) == ("killed", True)
    assert not _left(request_on_two_ranks)


@pytest.mark.slow
def test_the_error_of_a_rank_that_fails_later_is_reported_and_not_its_loss(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("RANKS_TEST", "late")
    with pytest.raises(StageError, match="the second rank says why, later") as caught:
        make(request_on_two_ranks, mode)
    assert caught.value.kind == "out_of_memory"
    assert not _left(request_on_two_ranks)


def error_of_hung_ranks(request: Request, mode: str, *begun: Path) -> StageError:
    """The error of two ranks, whose stall timeout is short once they have written all files ``begun``."""
    launcher = launcher_of(request, processes=2, stall_timeout_s=STARTUP_S, mode=mode)
    with closing(launcher), ThreadPoolExecutor(1) as thread:
        making = thread.submit(launcher.make, "ranks", [request])
        while not all(file.exists() for file in begun) and not making.done():
            time.sleep(0.05)
        launcher.config = launcher.config.model_copy(update={"stall_timeout_s": STALL_TIMEOUT_S})
        with pytest.raises(StageError, match="reported no progress") as caught:
            making.result()
    return caught.value


@pytest.mark.slow
def test_a_stopped_rank_counts_as_hung_and_nothing_of_it_is_left(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setenv("RANKS_TEST", "stop")
    stopped = tmp_path / "pid.1"
    error = error_of_hung_ranks(request_on_two_ranks, mode, stopped)
    ended_s = time.time()
    assert error.kind == "hung"
    assert ended_s - stopped.stat().st_mtime < STALL_TIMEOUT_S + KILLED_S
    assert not psutil.pid_exists(int(stopped.read_text()))
    assert not _left(request_on_two_ranks)
    assert len(list((Path(request_on_two_ranks.slot) / "logs").iterdir())) == 1


@pytest.mark.slow
def test_the_log_of_ranks_that_hang_says_where_each_of_them_was(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    monkeypatch.setenv("RANKS_TEST", "hang")
    error_of_hung_ranks(request_on_two_ranks, mode, *(tmp_path / f"pid.{rank}" for rank in (0, 1)))
    (log,) = (Path(request_on_two_ranks.slot) / "logs").iterdir()
    said = log.read_text(encoding="utf-8")
    assert " in waits_for_ever" in said
    assert " in gather" in said
    assert said.count("(most recent call first)") >= 2
    assert not _left(request_on_two_ranks)


def test_a_stage_out_of_memory_is_tried_again_with_half_as_much_at_once(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANKS_TEST", "crowd")
    # Any stage can tell, so one that starts without torch.
    light = request_on_two_ranks.model_copy(
        update={"stage": "report", "version": Report.version, "config": Report(title="", reward="")}
    )
    launcher = launcher_of(light)
    with pytest.raises(StageError, match="8 do not fit") as caught:
        launcher.make("crowd", [light])
    assert caught.value.kind == "out_of_memory"
    assert caught.value.retryable
    # The caller says it, once.
    assert "do not fit" not in capsys.readouterr().out
    launcher.make("crowd", [light])
    assert Artifact(input_of(light.slot)).json("at-once.json") == 4


def test_an_abort_of_cpp_for_lack_of_memory_counts_as_out_of_memory(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKS_TEST", "abort")
    light = request_on_two_ranks.model_copy(
        update={"stage": "report", "version": Report.version, "config": Report(title="", reward="")}
    )
    with pytest.raises(StageError, match="exit code -6") as caught:
        launcher_of(light).make("abort", [light])
    assert caught.value.kind == "out_of_memory"


def test_a_stage_that_failed_ends_at_once_whatever_still_works_in_it(
    request_on_two_ranks: Request, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANKS_TEST", "stuck")
    light = request_on_two_ranks.model_copy(
        update={"stage": "report", "version": Report.version, "config": Report(title="", reward="")}
    )
    path = tmp_path / "request.json"
    path.write_text(light.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "stages.execution.runner", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=STARTUP_S, check=False)
    assert ended.returncode == 70
    assert ended.stdout == "said before it failed"
    assert "a thread keeps the interpreter" in ended.stderr
    assert [failure.kind for failure in read_failures(tmp_path)] == ["crash"]


def _left(request: Request) -> list[psutil.Process]:
    """Processes that were started with this test's folder in their environment."""
    path, found = python_path(Path(request.slot).parent), []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PYTHONPATH") == path:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
