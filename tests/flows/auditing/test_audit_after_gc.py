"""Audits of runs of which `gc` deleted what was made again: nothing is wrong with what is left."""

from pathlib import Path

import pytest

from flows.auditing.audit import audit
from flows.auditing.checks.faults import Findings
from flows.garbage.run import gc
from flows.operations.rerun import rerun
from tests.flows.proved import RUN_ID, Proved


@pytest.fixture
def proved(tmp_path: Path) -> Proved:
    """A run whose last rollout was ended, and then deleted."""
    proved = Proved(tmp_path)
    proved.run()
    rerun(str(proved.store), RUN_ID, "rollout", 2)
    collect(proved)
    return proved


def collect(proved: Proved) -> None:
    found = gc(str(proved.store), RUN_ID, superseded=True, dry_run=False, older_than_h=0)
    assert any("rollout" in one.name for one in found.stages)


def look(proved: Proved) -> Findings:
    return audit(str(proved.store), RUN_ID)


def test_an_artifact_of_a_deleted_input_is_compared_with_the_equal_next_generation(proved: Proved):
    proved.run()
    found = look(proved)
    assert (found.faults, found.unchecked) == ([], [])


def test_an_artifact_that_waits_for_a_deleted_input_is_no_fault(proved: Proved):
    assert look(proved).faults == []


def test_a_wrong_byte_in_the_next_generation_is_still_found(proved: Proved):
    proved.run()
    (second,) = (proved.root / "iterations/0002/rollout/attempts").glob("*/index/00000.json")
    second.write_bytes(second.read_bytes()[:-1] + b" ")
    assert any("rollout" in fault.file for fault in look(proved).faults)
