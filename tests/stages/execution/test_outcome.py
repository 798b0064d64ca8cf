"""What a supervisor reads of a stage process: its last words, where they can be read."""

import os

from cosmos_rl_core.errors import ArtifactError
from stages.execution.outcome import Outcome, failure_of, read_failures, read_status


def test_unreadable_status_and_error_files_count_as_missing(tmp_path):
    outcome = Outcome(tmp_path, 0)
    outcome.progress("sampling", 0, 4)
    outcome.failed(failure_of(MemoryError("full")))
    Outcome(tmp_path, 1).failed(failure_of(ValueError("other")))
    assert [failure.kind for failure in read_failures(tmp_path)] == ["out_of_memory", "crash"]
    for damage in ("", "{", "[]", '{"kind": 1}'):
        (tmp_path / "status.json").write_text(damage, encoding="utf-8")
        (tmp_path / "error.0.json").write_text(damage, encoding="utf-8")
        assert read_status(tmp_path) is None
        assert [failure.kind for failure in read_failures(tmp_path)] == ["crash"]


def test_words_about_a_file_whose_name_is_no_utf8_are_kept_with_its_bytes_escaped(tmp_path):
    outcome, name = Outcome(tmp_path, 0), os.fsdecode(b"caf\xe9.png")
    outcome.note(f"reads {name}")
    outcome.failed(failure_of(ArtifactError(f"{name} is damaged")))
    status, (failure,) = read_status(tmp_path), read_failures(tmp_path)
    assert status is not None
    assert status.notes == ("reads caf\\udce9.png",)
    assert (failure.kind, failure.message) == ("data", "caf\\udce9.png is damaged")
