"""An attempt of a stage: its log."""

from pathlib import Path

from flows.launchers._base import JobState
from flows.running.attempts import RunningStage
from stages.artifacts.request import Request
from stages.reporting.contracts import Report


class Ended:
    """A job that has ended, and has written a log."""

    served_before = False

    def __init__(self, directory: Path, words: str) -> None:
        self.directory, self._words = directory, words

    def poll(self) -> JobState:
        return JobState("ended", 1)

    def log(self) -> bytes:
        return self._words.encode()

    def show_stacks(self) -> None: ...

    def cancel(self) -> None: ...

    def discard(self) -> None: ...


def test_logs_of_attempts_that_end_in_one_second_are_in_the_order_of_the_attempts(tmp_path: Path) -> None:
    request = Request(stage="report", slot=str(tmp_path / "report"), seed=0, config=Report(title="", reward=""))
    words = [f"attempt {number}" for number in range(6)]
    for said in words:
        RunningStage(request, Ended(tmp_path, said), lambda note: None).keep_log()
    logs = sorted((tmp_path / "report/logs").iterdir())
    assert [log.read_text() for log in logs] == words
