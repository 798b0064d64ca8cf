"""Numbers and heads of stages that were made outside of a session."""

from pathlib import Path

import pytest

from flows.session.recording import record
from tests.flows.auditing.test_live_audit import StoppedError, faults, stopped
from tests.flows.proved import Proved


@pytest.fixture
def proved(tmp_path: Path) -> Proved:
    return Proved(tmp_path)


def test_stages_that_are_made_one_by_one_leave_numbers_and_heads(proved: Proved):
    """As `stage/run` makes the stages of a run that was stopped, one after the other."""
    run, notes = stopped(proved, "iterations/0001/rollout/manifest.1.json"), list[str]()

    looks = 0

    def one_stage() -> None:
        """End the process once it has committed one artifact more."""
        nonlocal looks
        made = len(list(proved.root.rglob("manifest.*.json")))
        looks = looks or made
        if made > looks:
            raise StoppedError

    for _ in range(40):
        looks = 0
        try:
            proved.run(look=one_stage)
            break
        except StoppedError:
            record(run, notes.append)
            assert faults(proved) == []
    assert notes == []
    assert run.is_made
    assert {path.name for path in (proved.root / "heads").iterdir()} == {f"{n:05d}.json" for n in range(5)}
