"""What a supervisor reads of a stage process: its last words, where they can be read."""

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
