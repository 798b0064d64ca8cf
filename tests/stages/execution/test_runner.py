"""One stage as a process: its exit code and last words, and the numerics that it goes on under."""

import subprocess
import sys
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.numerics import numerics
from cosmos_rl_core.storage import store
from stages.artifacts.records import Pinned
from stages.artifacts.slots import current_of
from stages.execution.outcome import read_failures
from tests.stages.test_reward import RIGHT, UNSCORABLE, run, samples_slot, scoring, slot, write_samples

__all__ = ["samples_slot", "slot"]


def test_a_failing_process_writes_its_error_and_exits_with_75_without_torch(slot, samples_slot, tmp_path):
    request = scoring(slot, write_samples(samples_slot, [UNSCORABLE]))
    path = tmp_path / "process" / "request.json"
    path.parent.mkdir()
    path.write_text(request.model_dump_json(), encoding="utf-8")
    code = (
        "import sys; from stages.execution.runner import main\n"
        "exit_code = main(sys.argv[1:])\n"
        "sys.exit(1 if 'torch' in sys.modules else exit_code)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 75, ended.stderr
    (failure,) = read_failures(path.parent)
    assert (failure.kind, failure.retryable) == ("unavailable", True)
    assert "p0-000" in failure.message
    assert current_of(slot) == (1, None)


def test_a_run_goes_on_under_other_packages_only_if_that_is_allowed(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT])
    record = str(tmp_path / "numerics" / "reward.json")
    older = numerics() | {"packages": numerics()["packages"] | {"onnxruntime": "1.0"}}
    store.write(record, Pinned(stage="reward", numerics=older).sealed())
    with pytest.raises(ConfigError, match=r"began reward under other numerics \(packages\.onnxruntime: '1\.0' ->"):
        run(scoring(slot, source), tmp_path, numerics_record=record)
    assert current_of(slot) == (1, None)
    manifest, notes = run(scoring(slot, source), tmp_path, numerics_record=record, allow_numerics_change=True)
    assert len(notes) == 1
    assert notes[0].startswith("allowed change of numerics: packages")
    assert (manifest.generation, manifest.numerics) == (1, numerics())
    # What is already made is current under any.
    run(scoring(slot, source), tmp_path, numerics_record=record)


def test_a_light_stage_is_made_by_any_node_and_with_any_threads(slot, samples_slot, tmp_path):
    source = write_samples(samples_slot, [RIGHT])
    record = str(tmp_path / "numerics" / "reward.json")
    manifest, _ = run(scoring(slot, source), tmp_path, numerics_record=record)
    assert manifest.numerics.keys() == {"python", "packages"}
    assert "torch" not in manifest.numerics["packages"]
    # What other stages of the run began under holds for them alone.
    store.write(str(tmp_path / "numerics" / "policy.json"), Pinned(stage="policy", numerics={"python": "3.0"}).sealed())
    other, notes = run(scoring(str(tmp_path / "next"), source), tmp_path, threads=2, numerics_record=record)
    assert (other.numerics, notes) == (manifest.numerics, [])


def test_the_exit_code_tells_the_kind_if_the_log_cannot_be_written(tmp_path: Path):
    """`/dev/full` is a device without room."""
    command = [sys.executable, "-m", "stages.execution.runner", str(tmp_path / "request.json")]
    (tmp_path / "request.json").write_text("{}", encoding="utf-8")
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ended = subprocess.run(command, stdout=full, stderr=full, timeout=120, check=False)
    with_room = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert ended.returncode == with_room.returncode != 1
