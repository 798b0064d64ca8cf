"""Stages whose units workers share: real launcher, real workers, which are killed, stopped and asked to end."""

import json
import secrets
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import StageError
from flows.devices.devices import VISIBLE, Need, taken_now, users
from flows.launchers._elastic import JOIN_S
from flows.running.display import Display
from flows.running.wave import Waves
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import Embed, ModelRef
from tests.flows.allocated import wait_until
from tests.run_first import ONCE, run_first

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("elastic")]

COUNT = 6
TOLD = ("done", "go on", "unlike")
"""Files by which tests and workers tell each other something."""
STAGE = (
    ONCE
    + """
import json, os, signal, sys, time, types

LAST = Path(sys.orig_argv[-1])
if (HERE / "unlike").exists() and LAST.name == "request.json":
    if json.loads((LAST.parent / "execution.json").read_text())["worker"] == 1:
        # PyTorch computes with other instructions then, which the numerics name.
        os.environ["ATEN_CPU_CAPABILITY"] = "default"


def run(request, context):
    behaviour, at = json.loads((HERE / "work").read_text())
    layout = context.layout({"items": [[str(n)] for n in range(6)]})["items"]
    for n in context.units(len(layout)):
        context.progress("making", n, len(layout))
        name = f"items/{n}.json"
        if context.attempt.adopt(n):
            continue
        time.sleep(0.05)
        (HERE / f"has.{n}.{os.getpid()}").touch()
        while behaviour == "wait" and not (HERE / "go on").exists():
            time.sleep(0.05)
        if n == at and behaviour not in ("well", "wait") and (behaviour == "always" or once("done")):
            if behaviour == "fail":
                raise ValueError("this unit cannot be made")
            gentler = {"drain": signal.SIGTERM, "stop": signal.SIGSTOP}
            os.kill(os.getpid(), gentler.get(behaviour, signal.SIGKILL))
            time.sleep(3600)
        (HERE / f"made.{n}.{os.getpid()}").touch()
        context.attempt.finish(n, {name: json.dumps(n).encode()})
    values = [json.loads(context.attempt.read(f"items/{n}.json")) for n in context.own(len(layout))]
    if context.ranks.rank == 0:
        context.attempt.put_json("all.json", values)


stage = types.ModuleType("stage")
stage.run = run
sys.modules["stages.embed"] = stage
"""
)


class Notes(Display):
    """A display that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append)


class Launcher:
    """A launcher of two workers, which all tests use, in a folder from which every process takes the stage."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.notes = folder, Notes()
        settings = {"mode": "warm", "device": "cpu", "elastic": {"max": 2}, "stall_timeout_s": 10.0} | options
        self.waves = Waves(str(folder / "run"), LaunchConfig.model_validate(settings), self.notes)


class Work:
    """A Request whose workers make six units, one of which may behave badly at a unit."""

    def __init__(self, launcher: Launcher, name: str) -> None:
        self.launcher, self.folder = launcher, launcher.folder
        model = ModelRef(path="none", adapter="none", digest="none")
        config = Embed(model=model, prompts=(), max_prompt_length=1)
        self.request = Request(stage="embed", slot=str(self.folder / "run" / name), seed=0, config=config)
        launcher.notes.lines.clear()
        for left in (*self.folder.glob("made.*"), *self.folder.glob("has.*"), *map(self.folder.joinpath, TOLD)):
            left.unlink(missing_ok=True)

    def make(self, behaviour: str, at: int = 3) -> Artifact:
        (self.folder / "work").write_text(json.dumps([behaviour, at]), encoding="utf-8")
        self.launcher.waves.make("elastic", [self.request])
        return Artifact(input_of(self.request.slot))

    def made(self) -> list[int]:
        """The numbers of units that were made, of one made twice twice."""
        return sorted(int(path.name.split(".")[1]) for path in self.folder.glob("made.*"))

    def at_work(self) -> set[int]:
        """The processes that began a unit."""
        return {int(path.name.split(".")[2]) for path in self.folder.glob("has.*")}

    @property
    def said(self) -> str:
        return "\n".join(self.launcher.notes.lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("elastic")
    with pytest.MonkeyPatch.context() as patch:
        run_first(STAGE, folder, patch)
        patch.setenv("TMPDIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def launcher(folder: Path) -> Iterator[Launcher]:
    launcher = Launcher(folder)
    with closing(launcher.waves):
        yield launcher


@pytest.fixture
def work(launcher: Launcher, request: pytest.FixtureRequest) -> Work:
    return Work(launcher, request.node.name)


def test_workers_make_each_unit_once_and_one_worker_makes_the_artifact(work: Work) -> None:
    artifact = work.make("well")
    assert artifact.json("all.json") == [*range(COUNT)]
    assert work.made() == [*range(COUNT)]
    assert "lost" not in work.said
    assert artifact.manifest.numerics["world_size"] == 1


def test_resident_processes_are_workers_too(folder: Path) -> None:
    launcher = Launcher(folder, resident_gb=1, stall_timeout_s=60.0)
    with closing(launcher.waves):
        work = Work(launcher, "stay")
        assert work.make("kill").json("all.json") == [*range(COUNT)]
        assert work.made() == [*range(COUNT)]


@pytest.mark.parametrize(("behaviour", "why"), [("kill", "is lost (killed"), ("fail", "is lost (crash: ValueError")])
def test_a_lost_worker_costs_the_unit_that_it_had(work: Work, behaviour: str, why: str) -> None:
    assert work.make(behaviour).json("all.json") == [*range(COUNT)]
    assert work.made() == [*range(COUNT)], "what it made before stays, and what it had is made once"
    assert why in work.said
    assert "others make unit 3" in work.said


def test_a_worker_that_hangs_is_ended_with_its_stacks_and_its_unit_made_by_another(work: Work) -> None:
    assert work.make("stop").json("all.json") == [*range(COUNT)]
    assert "is lost (hung: it reported no progress and was ended); others make unit 3" in work.said


def test_sigterm_gives_a_unit_back_and_counts_as_no_loss(work: Work) -> None:
    assert work.make("drain").json("all.json") == [*range(COUNT)]
    assert "was asked to end, and gave back unit 3" in work.said
    assert "is lost" not in work.said


def test_a_unit_that_ends_three_workers_fails_the_stage_and_the_next_try_keeps_the_others(work: Work) -> None:
    with pytest.raises(StageError, match=r"unit 3 ended 3 workers, the last one so: exit code -9") as caught:
        work.make("always")
    assert caught.value.kind == "crash"
    (log,) = Path(work.request.slot, "logs").iterdir()
    assert log.read_text().count("=== worker") >= 3
    before = work.made()
    assert 3 not in before
    assert work.make("well").json("all.json") == [*range(COUNT)]
    assert work.made() == [*range(COUNT)], "finished units were adopted"


def test_a_worker_joins_on_a_device_that_another_run_frees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = [f"GPU-{secrets.token_hex(8)}-{name}" for name in "ab"]
    monkeypatch.setenv(VISIBLE, ",".join(two))
    launcher = Launcher(folder, resident_gb=1, stall_timeout_s=60.0)
    work = Work(launcher, "joined")
    share = taken_now(Need("update", 1, (1,)), two)
    assert share is not None
    other = subprocess.Popen(["sleep", "600"], stdin=share.file)
    share.close()

    def free_it_once_one_worker_has_the_other_device() -> list[dict[str, int]]:
        seen: list[dict[str, int]] = []
        try:
            for count in (1, 2):
                wait_until(lambda count=count: len(work.at_work()) == count)
                # Long enough for another one to be started, if it could.
                time.sleep(2 * JOIN_S)
                seen.append(users(two))
                other.kill()
                other.wait()
        finally:
            other.kill()
            (folder / "go on").touch()
        return seen

    with closing(launcher.waves), ThreadPoolExecutor(1) as thread:
        told = thread.submit(free_it_once_one_worker_has_the_other_device)
        assert work.make("wait").json("all.json") == [*range(COUNT)]
        before, after = told.result()
    assert before == {two[0]: after[two[0]], two[1]: other.pid}
    assert {*after.values()} == work.at_work()
    assert work.made() == [*range(COUNT)]


def test_a_worker_on_another_kind_of_machine_makes_nothing_and_says_so_once(folder: Path, work: Work) -> None:
    # The run has begun, so that it is known which of the two is unlike, whichever comes first.
    work.make("well")
    launcher = Launcher(folder, mode="cold", stall_timeout_s=60.0)
    work = Work(launcher, "unlike")
    (folder / "unlike").touch()

    def go_on_once_it_said_so() -> None:
        while "makes no units" not in work.said:
            time.sleep(0.05)
        # Long enough for a second one to be started in its place.
        time.sleep(2 * JOIN_S)
        (folder / "go on").touch()

    with closing(launcher.waves), ThreadPoolExecutor(1) as thread:
        told = thread.submit(go_on_once_it_said_so)
        assert work.make("wait").json("all.json") == [*range(COUNT)]
        told.result()
    assert work.made() == [*range(COUNT)]
    assert work.said.count("makes no units, because its numerics differ: worker 1: ") == 1
    assert "=== worker 2 ===" not in "".join(path.read_text() for path in Path(work.request.slot, "logs").iterdir())


def test_a_stage_is_refused_if_no_worker_has_the_numerics_of_the_run(
    folder: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.make("well")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    launcher = Launcher(folder, stall_timeout_s=60.0)
    refused = Work(launcher, "refused")
    with closing(launcher.waves), pytest.raises(StageError, match="no worker has the numerics") as caught:
        refused.make("well")
    assert caught.value.kind == "config"
    assert "--allow-numerics-change" in str(caught.value)
    assert refused.made() == []


def test_a_mistake_of_one_worker_ends_the_stage(work: Work) -> None:
    wrong = work.request.config.version + 1
    work.request = work.request.model_copy(update={"version": wrong})
    with pytest.raises(StageError, match="has version") as caught:
        work.make("well")
    assert caught.value.kind == "config"
