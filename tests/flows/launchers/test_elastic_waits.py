"""Workers of an elastic stage that wait for units, or hang: which of them are ended."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmos_rl_core.config.launch import LaunchConfig
from flows.launchers._base import Job, JobState
from flows.launchers._elastic import ElasticJob
from stages.artifacts.request import Request
from stages.contracts import Embed, ModelRef
from stages.execution.handing import FINISH, connected

STALL_S, PATIENCE_S = 1.5, 10.0


class Worker:
    """A worker without a process, for which the test speaks."""

    served_before = False

    def __init__(self, folder: Path, number: int, units: Path) -> None:
        folder.mkdir()
        self.directory, self.ended = folder, False
        self._socket = connected(units)
        self._lines = self._socket.makefile("rb")
        self.say({"worker": number})

    def say(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def ask(self) -> Any:
        """The answer to a question for the only unit; [] if there is none for a second."""
        self.say({"ask": 1, "of": 1})
        return json.loads(self._lines.readline())

    def poll(self) -> JobState:
        return JobState("running")

    def log(self) -> bytes:
        return b""

    def show_stacks(self) -> None: ...

    def cancel(self) -> None:
        self.ended = True

    def discard(self) -> None:
        self._lines.close()
        self._socket.close()


class Stage:
    """A stage of one unit, and the workers that it has asked for."""

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.workers, self.notes = folder, list[Worker](), list[str]()
        model = ModelRef(path="none", adapter="none", digest="none")
        config = Embed(model=model, prompts=(), max_prompt_length=1)
        request = Request(stage="embed", slot=str(folder / "run/embed"), seed=0, config=config)
        launch = LaunchConfig.model_validate({"elastic": {"max": most}, "stall_timeout_s": STALL_S})
        self.job = ElasticJob(Job(request), self, launch, most, self.notes.append)
        self.job.poll()

    def join(self, job: Job) -> Worker:
        assert job.execution.units is not None
        number = job.execution.worker
        self.workers.append(Worker(self.folder / str(number), number, Path(job.execution.units)))
        return self.workers[-1]

    def poll_until_ended(self, worker: Worker) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not worker.ended and time.monotonic() < deadline_s:
            self.job.poll()
            time.sleep(0.02)
        assert worker.ended


@contextmanager
def stage_of(folder: Path, most: int) -> Iterator[Stage]:
    stage = Stage(folder, most)
    try:
        yield stage
    finally:
        stage.job.cancel()
        stage.job.discard()


def test_a_worker_that_waited_has_the_whole_stall_timeout_for_the_unit_of_one_that_hung(tmp_path: Path) -> None:
    with stage_of(tmp_path, 2) as stage:
        first, second = stage.workers
        assert first.ask() == [0]
        assert second.ask() == []
        stage.poll_until_ended(first)
        while (answer := second.ask()) == []:
            stage.job.poll()
        assert answer == [0]
        stage.job.poll()
        assert not second.ended, stage.notes


def test_a_worker_that_hangs_while_it_makes_the_artifact_is_ended(tmp_path: Path) -> None:
    with stage_of(tmp_path, 1) as stage:
        (worker,) = stage.workers
        assert worker.ask() == [0]
        worker.say({"made": 0})
        assert worker.ask() == FINISH
        stage.poll_until_ended(worker)
        assert "hung" in stage.notes[-1]
        assert len(stage.workers) == 2, "another one makes it"
