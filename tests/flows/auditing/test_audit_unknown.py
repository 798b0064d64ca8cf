"""Files of a run that nothing names: those that pass for a part of an artifact or a record are faults."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.auditing.audit import audit
from flows.auditing.checks.faults import Findings
from flows.garbage.run import gc
from stages.artifacts.generations import invalidate
from stages.artifacts.records import Invalidated
from tests.flows.proved import KEPT, RUN_ID, Forger, Proved, body_of, told

ROLLOUT = "iterations/0001/rollout"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    proved = Proved(tmp_path_factory.mktemp("proved"))
    proved.run()
    assert _audit(proved.store) == Findings(str(proved.store)).faults
    return proved.store


def _audit(store: Path, iteration: int | None = None) -> list[str]:
    """What nothing names and is no fault."""
    return audit(str(store), RUN_ID, iteration).unknown


@pytest.fixture
def forger(finished: Path, tmp_path: Path) -> Forger:
    return Forger(shutil.copytree(finished, tmp_path / "store"))


def put(forger: Forger, name: str) -> None:
    path = forger.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


def attempt(forger: Forger, slot: str) -> str:
    return f"{slot}/attempts/{body_of(forger.root / slot / 'manifest.1.json')['attempt']}"


UNNAMED = "nothing names it; look where it comes from, and remove it"


@pytest.mark.parametrize("name", ["media/99999.tar", "tensors/00000.bak", "extra", "records/more.json"])
def test_an_extra_file_in_the_folder_of_an_artifact_is_found(forger: Forger, name: str):
    put(forger, added := f"{attempt(forger, ROLLOUT)}/{name}")
    assert told(forger) == [f"{added} file: {UNNAMED}"]
    found = audit(str(forger.store), RUN_ID, 1)
    assert [one.what for one in found.faults] == [UNNAMED]
    assert audit(str(forger.store), RUN_ID, 0).faults == []


RECORDS = ["manifest.9.json", "manifest.1.json.bak", "layout.4.json", "invalidated.7.json", "dropped.3.media.json"]


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_a_generation_that_does_not_exist_is_found(forger: Forger, name: str):
    put(forger, f"{ROLLOUT}/{name}")
    assert told(forger) == [f"{ROLLOUT}/{name} file: {UNNAMED}"]


def test_a_record_of_versions_without_its_predecessor_is_found(forger: Forger):
    put(forger, "versions.4.json")
    assert told(forger) == [f"versions.4.json file: {UNNAMED}"]


def test_leftovers_of_processes_are_no_faults_and_not_listed(forger: Forger):
    left = [
        "logs/20260101T000000-aaaa.log",
        "attempts/00ff00ff00ff00ff/media/00000.tar",
        "renewed",
        "ahead/x/00000.json",
    ]
    for name in left:
        put(forger, f"{ROLLOUT}/{name}")
    for name in (
        "lease/1.json", "lease/1.count", "lease/1.released", "lease/1.stop", ".probe/written", "progress.json",
        "steps/rollout-1-2/request.json", f".plan.json.{'0' * 16}", f"{ROLLOUT}/.manifest.1.json.{'0' * 16}",
        "heads/00001.0123456789abcdef.sig", f"{attempt(forger, ROLLOUT)}/media/.00000.tar.{'0' * 16}", "command.json",
    ):  # fmt: skip
        put(forger, name)
    assert told(forger) == []
    assert _audit(forger.store) == []


def test_other_files_are_listed_by_folder_and_are_no_faults(forger: Forger):
    for name in ("notes.txt", f"{ROLLOUT}/notes.txt", "iterations/0001/mine/a/b", "iterations/0001/mine/a/c"):
        put(forger, name)
    found = audit(str(forger.store), RUN_ID)
    assert found.faults == []
    run = f"runs/{RUN_ID}"
    assert found.unknown == [
        f"{run}/iterations/0001/mine/ (2 files)", f"{run}/{ROLLOUT}/notes.txt", f"{run}/notes.txt",
    ]  # fmt: skip
    assert f"nothing names: {run}/notes.txt" in found.lines()
    assert found.as_json()["unknown"] == found.unknown
    assert _audit(forger.store, 1) == [f"{run}/{ROLLOUT}/notes.txt"]
    assert _audit(forger.store, 0) == []


STRAY = (
    f"{ROLLOUT}/shards/.DS_Store",
    f"{ROLLOUT}/shards/{'0' * 32}/.nfs0001",
    "iterations/0001/warn/decisions/.DS_Store",
)
"""Files of a file manager and of a network file system in folders of records."""


def test_files_of_other_programs_among_records_are_no_records(tmp_path: Path):
    proved = Proved(tmp_path)

    def look() -> None:
        if (proved.root / ROLLOUT / "manifest.1.json").exists():
            for name in STRAY:
                put(Forger(proved.store), name)

    proved.run(look=look)
    for _ in range(2):
        found = audit(str(proved.store), RUN_ID)
        assert found.faults == []
        assert found.unknown == [
            f"runs/{RUN_ID}/iterations/0001/rollout/shards/ (2 files)",
            f"runs/{RUN_ID}/iterations/0001/warn/ (1 file)",
        ]
        # They may change or go at any time.
        for name in STRAY:
            (proved.root / name).write_bytes(b"y")
    gc(str(proved.store), RUN_ID, superseded=True, dry_run=False, older_than_h=0)


def test_a_second_file_of_a_shard_that_two_attempts_made_is_no_fault(forger: Forger):
    """Both attempts wrote it, and the artifact has the other one's."""

    def theirs(body: dict[str, Any]) -> None:
        for name, entry in body["files"].items():
            if name.startswith("media/"):
                entry["path"] = f"attempts/{'0' * 16}/{name}"

    slot = forger.root / ROLLOUT
    own = slot / "attempts" / body_of(slot / "manifest.1.json")["attempt"]
    shutil.copytree(own / "media", slot / "attempts" / ("0" * 16) / "media")
    forger.manifest(ROLLOUT, theirs)
    forger.seal()
    assert told(forger) == []


def test_files_of_an_ended_generation_are_no_fault(tmp_path: Path):
    proved = Proved(tmp_path)
    run = proved.run(keep=(KEPT[1],), iterations=2)
    slot = run.slots.iteration(0, "reward-ocr")
    invalidate(slot, 1, "asked for")
    proved.run(keep=(KEPT[1],), iterations=2)
    assert Path(Invalidated.url(slot, 1)).exists()
    found = audit(str(proved.store), RUN_ID)
    assert (found.faults, found.unknown) == ([], [])
