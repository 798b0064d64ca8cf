"""Attempts that end by a Python exception: where it was raised is told, and the same one twice ends the stage."""

import copy
from contextlib import closing
from pathlib import Path

import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.errors import StageError
from tests.flows.allocated import STAGE, Work

pytestmark = pytest.mark.processes
LINE = 1 + STAGE.splitlines().index('        raise TypeError((HERE / "bug").read_text())')


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    """Stages that end at once."""
    work = Work(tmp_path, monkeypatch)
    work.go()
    return work


def test_the_same_exception_at_the_same_line_on_two_attempts_ends_the_stage(work: Work):
    request, bug, fail = work.request("a"), work.folder / "bug", work.folder / "fail"

    with closing(work.launcher(LaunchConfig())) as waves:

        def attempt() -> StageError:
            with pytest.raises(StageError) as ended:
                waves.make("a", [request])
            return ended.value

        bug.write_text("unsupported operand 1", encoding="utf-8")
        first = attempt()
        assert (first.kind, first.retryable, first.exit_code) == ("crash", True, 70)
        assert "TypeError: unsupported operand 1; on rank 0, at " in str(first)
        assert f"sitecustomize.py:{LINE} in run; log: {request.slot}/logs/" in str(first)
        log = Path(str(first).rpartition("log: ")[2])
        assert "unsupported operand 1" in log.read_text(encoding="utf-8")
        bug.unlink()

        # Another failure between two equal ones: they may both have passing reasons.
        fail.touch()
        assert (attempt().kind, attempt().retryable) == ("out_of_memory", True)
        fail.unlink()
        bug.write_text("unsupported operand 2", encoding="utf-8")
        assert attempt().retryable
        # Numbers in a message may differ from attempt to attempt.
        bug.write_text("unsupported operand 3", encoding="utf-8")
        last = attempt()
        assert not last.retryable
        assert "the attempt before ended there too" in str(last)
        for other in (copy.copy(last), last.in_full()):
            assert (other.kind, other.retryable, str(other)) == ("crash", False, str(last))
        bug.unlink()
        waves.make("a", [request])


def test_a_stage_that_hung_twice_may_be_tried_again(work: Work):
    (work.folder / "go").unlink()
    request = work.request("a")
    with closing(work.launcher(LaunchConfig(time_limit_s=0.1))) as waves:
        for _ in range(2):
            with pytest.raises(StageError) as ended:
                waves.make("a", [request])
            assert (ended.value.kind, ended.value.retryable) == ("hung", True)
