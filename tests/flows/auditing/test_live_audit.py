"""Audits of a run that is at work: what is not there yet is no fault, and what was lost is one."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.storage import store
from flows.auditing.audit import audit
from flows.planning.base import AnyRun
from flows.planning.plan import METRICS_FILE
from flows.planning.steps import read_run
from stages.artifacts.generations import invalidate
from stages.artifacts.slots import drop
from tests.flows.proved import RUN_ID, Proved


def faults(proved: Proved, run_id: str = RUN_ID) -> list[str]:
    return [f"{one.file} {one.field}: {one.what}" for one in audit(str(proved.store), run_id).faults]


@pytest.fixture
def proved(tmp_path: Path) -> Proved:
    return Proved(tmp_path)


def audits_of(proved: Proved, run_id: str = RUN_ID, **options: Any) -> list[list[str]]:
    """The faults of an audit at each moment between two writes of a run that is made, with its lease held."""
    found: list[list[str]] = []
    iterations = options.get("iterations", 3)
    lease = proved.plan(run_id, iterations=iterations).lease()

    def look() -> None:
        found.append(faults(proved, run_id))

    with lease:
        proved.run(run_id, look=look, **options)
    found.append(faults(proved, run_id))
    return found


def test_a_run_in_an_empty_store_has_no_fault_at_any_moment(proved: Proved):
    found = audits_of(proved, iterations=1)
    assert len(found) > 20
    assert [one for one in found if one] == []


def test_a_run_with_embeddings_of_other_runs_has_no_fault_at_any_moment(proved: Proved):
    proved.run("other")
    found = audits_of(proved, iterations=1)
    assert len(found) > 20
    assert [one for one in found if one] == []


def test_a_run_of_fewer_iterations_than_planned_has_no_fault_at_any_moment(proved: Proved):
    proved.plan()
    proved.run(iterations=1)
    assert faults(proved) == []


def test_audits_that_race_with_the_run_find_nothing(proved: Proved):
    run, ended = proved.plan(), threading.Event()

    def work() -> None:
        try:
            with run.lease():
                proved.run()
        finally:
            ended.set()

    worker = threading.Thread(target=work)
    found = [faults(proved)]
    worker.start()
    while not ended.is_set():
        found.append(faults(proved))
    worker.join()
    found.append(faults(proved))
    assert read_run(str(proved.store), RUN_ID).is_made
    assert [one for one in found if one] == []


@pytest.mark.slow
def test_a_run_that_went_on_past_its_end_has_no_fault(proved: Proved):
    proved.run(iterations=1)
    assert faults(proved) == []
    assert [one for one in audits_of(proved, iterations=2) if one] == []


class StoppedError(Exception):
    """The end of a run's process."""


def stopped(proved: Proved, name: str) -> AnyRun:
    """A run that was ended as soon as there was a file of that name."""

    def look() -> None:
        if list(proved.root.glob(name)):
            raise StoppedError

    with pytest.raises(StoppedError):
        proved.run(look=look)
    return read_run(str(proved.store), RUN_ID)


LOST: dict[str, Callable[[Path], object]] = {
    "a line": lambda root: (root / METRICS_FILE).write_bytes((root / METRICS_FILE).read_bytes().split(b"\n", 1)[1]),
    "the last line": lambda root: (root / METRICS_FILE).write_bytes(
        b"\n".join((root / METRICS_FILE).read_bytes().split(b"\n")[:-2])
    ),
    "all lines": lambda root: (root / METRICS_FILE).unlink(),
    "a head": lambda root: (root / "heads" / "00000.json").unlink(),
    "a policy": lambda root: shutil.rmtree(root / "policy"),
    "a fragment": lambda root: shutil.rmtree(root / "iterations" / "0000" / "fragment"),
}


@pytest.fixture(scope="module")
def before_an_update(tmp_path_factory: pytest.TempPathFactory) -> Proved:
    """A run that was ended after its second rewards."""
    proved = Proved(tmp_path_factory.mktemp("stopped"))
    stopped(proved, "iterations/0001/reward-ocr/manifest.1.json")
    assert faults(proved) == []
    return proved


@pytest.mark.parametrize("what", LOST)
def test_lost_records_from_before_the_last_stage_of_a_stopped_run_are_found(
    before_an_update: Proved, proved: Proved, what: str
):
    shutil.copytree(before_an_update.store, proved.store)
    LOST[what](proved.root)
    assert faults(proved)
    with read_run(str(proved.store), RUN_ID).lease():
        # That somebody holds the lease excuses nothing.
        assert faults(proved)


def test_a_missing_last_head_is_a_fault_unless_a_process_works_on_the_run(proved: Proved):
    run = proved.run()
    (proved.root / "heads" / "00003.json").unlink()
    assert [one for one in faults(proved) if "no head was written after the report" in one]
    with run.lease():
        found = audit(str(proved.store), RUN_ID)
        assert found.faults == []
        assert "the head after the report" in found.pending[0]
        assert f"not there yet: {found.pending[0]}" in found.lines()


@pytest.mark.slow
def test_numbers_of_a_stage_that_was_made_again_may_wait_for_the_run(proved: Proved):
    """`rerun` ends a generation; the file has the lines of the one before until the run has gone on."""
    run = proved.run(iterations=2)
    invalidate(run.slots.iteration(0, "reward-ocr"), 1, "asked for")
    assert faults(proved) == []
    assert [one for one in audits_of(proved, iterations=2) if one] == []


def test_media_that_retention_deletes_while_they_are_hashed_are_no_fault(
    proved: Proved, monkeypatch: pytest.MonkeyPatch
):
    run = proved.run(keep=())
    slot, size = run.slots.iteration(2, "rollout"), store.size

    def dropped_after(url: str) -> int | None:
        found = size(url)
        if url.startswith(slot) and url.endswith(".tar") and threading.current_thread() is not threading.main_thread():
            monkeypatch.undo()
            drop(slot, "media")
        return found

    monkeypatch.setattr(store, "size", dropped_after)
    found = audit(str(proved.store), RUN_ID)
    assert found.faults == []
    assert found.gone == ["runs/proved/iterations/0002/rollout, generation 1: media"]


def test_files_from_before_a_plan_make_no_run(proved: Proved):
    proved.plan("other")
    url = proved.plan().url
    store.remove(store.join(url, "plan.json"))
    (Path(url) / f".plan.json.{'0' * 16}").write_bytes(b"{")
    with pytest.raises(Exception, match="no run"):
        audit(str(proved.store), RUN_ID)


def test_half_written_files_of_a_killed_process_are_no_records(proved: Proved):
    proved.run()
    for folder in ("iterations/0001/rollout/shards/x", "iterations/0001/warn/decisions/x", "heads"):
        (proved.root / folder).mkdir(parents=True, exist_ok=True)
        (proved.root / folder / f".00000.json.{'0' * 16}").write_bytes(b"{")
    assert [one for one in faults(proved) if "0000000" in one] == []
