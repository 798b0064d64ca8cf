"""Waves as Prefect tasks, by a stand-in for Prefect's engine: reuse, another attempt, and how a wave ends."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.states import State

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import StageError, StoppedError
from flows.running import launch as launching
from stages.artifacts.request import Request
from stages.artifacts.slots import current_of
from tests.hand_made import make, report


class Engine:
    """What a task of Prefect does: work that returns a failed state is done again while that is worth it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.states: list[str] = []

    def task(self, *, task_run_name: str, retries: int = 0, retry_condition_fn: Any = None, **_: Any) -> Any:
        self.names.append(task_run_name)

        def run(work: Callable[[], Any]) -> Callable[[], Any]:
            def tried() -> Any:
                for left in range(retries, -1, -1):
                    found = work()
                    self.states.append(str(found.name) if isinstance(found, State) else "Completed")
                    failed = isinstance(found, State) and found.is_failed()
                    if not (failed and left and retry_condition_fn(None, None, found)):
                        return found
                return None

            return tried

        return run


class Waves(SimpleNamespace):
    """A run's waves, each made by the next of ``makes``."""

    def __init__(self, *makes: Callable[[Sequence[Request]], object], **launch: Any) -> None:
        notes = list[str]()
        display = SimpleNamespace(note=notes.append, done=lambda *_, skipped: self.done.append(skipped))
        super().__init__(
            config=LaunchConfig(**launch), notes=notes, display=display, begun=set[str](), done=list[bool]()
        )
        self.makes = list(makes)

    def check(self) -> None:
        """Let the run go on."""

    def waiting(self) -> SimpleNamespace:
        """Return that nobody waits."""
        return SimpleNamespace()

    def make(self, name: str, missing: list[Request], asked_s: float, holding: object) -> None:
        """Make what is missing as the test says."""
        self.makes.pop(0)(missing)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(launching, "task", engine.task)
    monkeypatch.setattr(launching.pauses, "wait_while_paused", lambda _: None)
    return engine


def fails(kind: str) -> Callable[[Sequence[Request]], None]:
    def work(_: Sequence[Request]) -> None:
        raise StageError.of(kind, f"a {kind}", log="last words")

    return work


def makes_all(missing: Sequence[Request]) -> None:
    for request in missing:
        make(request)


def test_only_what_is_missing_of_a_wave_is_made_and_the_order_stays(engine: Engine, tmp_path: Path):
    requests = [report(str(tmp_path / name)) for name in "abc"]
    make(requests[1])
    asked: list[Request] = []
    waves: Any = Waves(lambda missing: asked.extend(missing) or makes_all(missing))
    found = launching.launch(waves, "iteration-0000/update+report", *requests)
    assert [one.fingerprint for one in found] == [one.fingerprint for one in requests]
    assert found == [current_of(one.slot)[1] for one in requests]
    assert asked == [requests[0], requests[2]]
    assert waves.begun == {requests[0].slot, requests[2].slot}
    # All are current now.
    assert launching.launch(waves, "iteration-0000/update+report", *requests) == found
    assert (engine.states, waves.done) == (["Completed", "Skipped"], [False, True])
    assert engine.names == ["iteration-0000/update+report"] * 2


def test_a_failure_that_may_pass_is_tried_again_and_said(engine: Engine, tmp_path: Path):
    request = report(str(tmp_path / "a"))
    waves: Any = Waves(fails("killed"), makes_all, max_attempts=2)
    assert launching.launch(waves, "report", request) == [current_of(request.slot)[1]]
    assert engine.states == ["Failed", "Completed"]
    assert waves.notes == ["another attempt follows: a killed"]


@pytest.mark.parametrize(("kind", "attempts"), [("config", 1), ("killed", 3)])
def test_the_last_failure_is_raised_with_its_log(engine: Engine, tmp_path: Path, kind: str, attempts: int):
    waves: Any = Waves(*[fails(kind)] * 3, max_attempts=3)
    with pytest.raises(StageError, match=f"^a {kind}:\nlast words$"):
        launching.launch(waves, "report", report(str(tmp_path / "a")))
    assert engine.states == ["Failed"] * attempts


def test_a_process_that_made_nothing_has_crashed(engine: Engine, tmp_path: Path):
    waves: Any = Waves(lambda _: None, max_attempts=1)
    with pytest.raises(StageError, match="report ended without a current artifact"):
        launching.launch(waves, "report", report(str(tmp_path / "a")))


def test_a_run_that_is_stopped_leaves_a_cancelled_task(engine: Engine, tmp_path: Path):
    def stops(_: Sequence[Request]) -> None:
        raise StoppedError("stopped by somebody")

    waves: Any = Waves(stops, max_attempts=3)
    with pytest.raises(StoppedError, match="stopped by somebody"):
        launching.launch(waves, "report", report(str(tmp_path / "a")))
    assert engine.states == ["Cancelled"]
