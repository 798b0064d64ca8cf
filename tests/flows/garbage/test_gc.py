"""Garbage: what a killed attempt left goes; what an artifact holds, or a retry would adopt, stays."""

import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cosmos_rl_core.errors import LeaseError, UnavailableError
from cosmos_rl_core.storage import store
from flows.defaults import GRACE_H
from flows.garbage.run import gc
from flows.library.states import states
from flows.operations.rerun import rerun
from flows.planning import requests
from flows.planning.run import Run
from flows.planning.steps import read_run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.execution.outcome import failure_of, read_failures
from tests.flows.by_hand import make_one, whole_run
from tests.hand_made import begin, commit, make_run, report, rewards

LITTER = b"12345"


def litter(slot: str) -> str:
    """A file of an attempt that was killed before it committed."""
    store.write(f"{slot}/attempts/dead/current/00000.safetensors", LITTER)
    return f"{slot}/attempts/dead/current/00000.safetensors"


def require_whole(run: Run) -> None:
    for state in states(read_run(run.store_url, "hand")):
        assert state.word == "stands"
        artifact = Artifact(input_of(state.step.slot))
        assert all(artifact.read(name) for name in artifact.names())


def collect(run: Run, *, superseded: bool = False, dry_run: bool = False, older_than_h: float = 0.0) -> list[str]:
    found = gc(run.store_url, "hand", superseded=superseded, dry_run=dry_run, older_than_h=older_than_h)
    return list(found.lines())


def written(url: str, hours_ago: float) -> str:
    """Sets when a file was written."""
    then_s = time.time() - 3600 * hours_ago
    os.utime(url, (then_s, then_s))
    return url


def in_a_process(limit: str, code: str, *arguments: str) -> str:
    """What a process says that may write files of so many bytes, as on a disk that is full."""
    preamble = f"import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    command = [sys.executable, "-c", preamble + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR without folders of others."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_a_clean_run_has_no_garbage(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    before = store.listed(run.url)
    assert collect(run, superseded=True) == [f"nothing to delete in {run.url}"]
    assert {name for name in store.listed(run.url) if not name.startswith("lease/")} == set(before)


def test_files_of_dead_attempts_are_listed_and_then_deleted(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    before = set(store.listed(run.url))
    places = [litter(run.slots.policy(0)), litter(run.slots.iteration(1, "rollout"))]
    said = collect(run, dry_run=True)
    assert [line.split()[0] for line in said] == ["policy", "iteration-0001/rollout", "would"]
    assert all(store.size(place) == len(LITTER) for place in places)
    assert collect(run)[-1] == "freed 0.0 MB"
    assert {name for name in store.listed(run.url) if not name.startswith("lease/")} == before
    require_whole(run)


def test_finished_shards_of_an_unfinished_generation_stay(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    attempt = begin(requests.rollout(run, 1), layout={"shards": 2})
    attempt.finish(0, {"0.tar": b"finished"})
    attempt.put("1.tar", LITTER)
    assert collect(run)[:-1] == [f"{'iteration-0001/rollout':<28} {1:>6} files {0.0:>12.1f} MB"]
    retry = begin(requests.rollout(run, 1), layout={"shards": 2})
    assert retry.adopt(0)
    assert retry.read("0.tar") == b"finished"


def test_files_of_ended_generations_go_on_request_and_their_manifests_stay(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    slot = run.slots.iteration(0, "reward-jpeg")
    (old,) = [name for name in store.listed(slot) if name.startswith("attempts/")]
    rerun(run.store_url, "hand", "reward-jpeg", 0)
    make_one(next(request for request in rewards(run, run.slots.iteration(0, "rollout"), 0) if request.slot == slot))
    assert collect(run) == [f"nothing to delete in {run.url}"]
    assert "iteration-0000/reward-jpeg" in collect(run, superseded=True)[0]
    assert store.size(f"{slot}/{old}") is None
    assert store.size(f"{slot}/manifest.1.json") is not None
    require_whole(run)


def test_gc_is_refused_while_a_process_works_on_the_run(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    place = litter(run.slots.policy(0))
    with run.lease(), pytest.raises(LeaseError, match="another process works on"):
        collect(run)
    assert store.size(place) == len(LITTER)


def test_all_files_of_an_attempt_that_wrote_something_lately_stay(recipe, tmp_path):
    run = make_run(recipe(), tmp_path, iterations=1)
    attempt = begin(requests.rollout(run, 1), layout={"shards": 2})
    attempt.put("0.tar", LITTER)
    attempt.put("1.tar", LITTER)
    slot = run.slots.iteration(1, "rollout")
    first, second = (f"{slot}/{attempt.files[name].path}" for name in ("0.tar", "1.tar"))
    written(first, 100.0)
    written(second, GRACE_H - 0.1)
    kept = "kept 2 files, 0.0 MB, of iteration-0001/rollout: a stage that wrote less than 24 h ago may still run; "
    assert collect(run, older_than_h=GRACE_H) == [
        f"nothing to delete in {run.url}",
        f"{kept}--older-than 0 deletes them too",
    ]
    # The stage outlived its flow, and comes to its end.
    manifest = commit(attempt)
    assert Artifact(input_of(slot)).read("0.tar") == LITTER
    assert collect(run, older_than_h=GRACE_H) == [f"nothing to delete in {run.url}"]
    assert manifest.attempt == attempt.id
    written(litter(slot), GRACE_H + 0.1)
    assert collect(run, older_than_h=GRACE_H)[-1] == "freed 0.0 MB"


def test_a_generation_that_was_ended_lately_may_still_be_read(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    slot = run.slots.iteration(0, "reward-jpeg")
    (old,) = [f"{slot}/{name}" for name in store.listed(slot) if name.startswith("attempts/")]
    rerun(run.store_url, "hand", "reward-jpeg", 0)
    make_one(next(request for request in rewards(run, run.slots.iteration(0, "rollout"), 0) if request.slot == slot))
    written(old, 100.0)
    assert "kept 1 files" in collect(run, superseded=True, older_than_h=GRACE_H)[-1]
    written(f"{slot}/invalidated.1.json", 100.0)
    assert collect(run, superseded=True, older_than_h=GRACE_H)[-1] == "freed 0.0 MB"
    assert store.size(old) is None


GC = """
from cosmos_rl_core.errors import LeaseError
from flows.garbage.run import gc

try:
    print(*list(gc(sys.argv[1], "hand", superseded=False, dry_run=False, older_than_h=0.0).lines())[-1:])
except LeaseError as error:
    print("refused:", error)
"""


@pytest.mark.processes
def test_a_disk_without_any_space_is_freed_unless_a_process_works_on_the_run(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    place = litter(run.slots.policy(0))
    with run.lease():
        assert f"pid {os.getpid()} on " in in_a_process("0", GC, run.store_url)
        assert store.size(place) == len(LITTER)
    assert in_a_process("0", GC, run.store_url) == "freed 0.0 MB\n"
    assert store.size(place) is None
    require_whole(run)


WRITER = """
import time
from cosmos_rl_core.storage import store

def chunks():
    yield b"1" * 100_000
    print("writing", flush=True)
    time.sleep(600)
    yield b"2"

store.write_stream(sys.argv[1], chunks())
"""


def half_written(url: str) -> subprocess.Popen[str]:
    """A process in the middle of writing a file."""
    process = subprocess.Popen([sys.executable, "-c", "import sys\n" + WRITER, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    return process


def test_half_written_files_go_once_their_writer_has_ended(recipe, tmp_path):
    run = whole_run(recipe, tmp_path)
    places = ("policy/logs/a.log", "lease/9.json", "iterations/0001/rollout/shards/x/00001.json")
    writers = [half_written(f"{run.url}/{place}") for place in places]
    writers.append(half_written(f"{run.store_url}/dataset/x/part"))
    assert collect(run) == [f"nothing to delete in {run.url}"]
    for writer in writers:
        writer.kill()
        writer.communicate()
    assert collect(run, older_than_h=GRACE_H) == [f"nothing to delete in {run.url}"]
    assert collect(run)[0].split() == ["half-written", "3", "files", "0.3", "MB"]
    (shared,) = Path(run.store_url, "dataset", "x").iterdir()
    # Other runs write there too, whose lease nobody has asked for.
    written(str(shared), GRACE_H + 0.1)
    assert collect(run)[0].split() == ["half-written", "in", "dataset/", "1", "files", "0.1", "MB"]
    assert not any(map(store.is_temporary, store.listed(run.store_url)))


STAGE = """
import types
from pathlib import Path
from stages.execution import runner

def run(request, context):
    context.layout({"shards": 3})
    context.attempt.finish(0, {"0": b"1" * 1000})
    context.attempt.put("whole", b"2" * 1000)
    context.attempt.finish(1, {"1": b"3" * 1000, "2": b"4" * 50_000})

stage = types.ModuleType("stages.report")
stage.run = run
sys.modules["stages.report"] = stage
print(runner.main([sys.argv[1]]))
"""


def test_a_stage_without_space_leaves_nothing_but_finished_shards_and_names_the_command(tmp_path):
    request = report(str(tmp_path / "slot"))
    (tmp_path / "request.json").write_text(request.model_dump_json(), encoding="utf-8")
    for _ in range(2):
        assert in_a_process("20_000", STAGE, str(tmp_path / "request.json")).splitlines()[-1] == "75"
    (failure,) = read_failures(tmp_path)
    assert (failure.kind, failure.retryable) == ("unavailable", True)
    assert "no space left to write" in failure.message
    assert "`cosmos-flows gc RUN --store STORE`" in failure.message
    found = store.listed(str(tmp_path / "slot"))
    assert [entry.size for name, entry in found.items() if name.startswith("attempts/")] == [1000]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_elsewhere_is_no_crash_and_names_the_command(error):
    failure = failure_of(error)
    assert failure.kind == "unavailable"
    assert "`cosmos-flows gc RUN --store STORE` deletes" in failure.message
    assert failure_of(UnavailableError("a judge says: no space left on device")).message.count("gc") == 0
