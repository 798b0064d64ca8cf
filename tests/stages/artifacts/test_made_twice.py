"""A shard that two attempts make: the first one counts, and the second one must be equal."""

import secrets
from pathlib import Path

import pytest

from cosmos_rl_core.errors import RepeatError
from stages.artifacts.attempt import Attempt
from tests.hand_made import remove, report


def attempts(folder: Path) -> tuple[Attempt, Attempt]:
    """Two attempts at one artifact of two shards, at the same time."""
    request = report(str(folder / "slot"))
    layout = {"items": [["a"], ["b"]]}
    both = Attempt(request, {}, 1, secrets.token_hex(8)), Attempt(request, {}, 1, secrets.token_hex(8))
    for attempt in both:
        attempt.use_layout(attempt.layout(layout, print), 1)
    return both


def test_an_equal_copy_is_dropped_and_another_one_is_an_error_that_names_both(tmp_path: Path) -> None:
    first, second = attempts(tmp_path)
    for number, made in enumerate((b"same", b"first")):
        first.finish(number, {f"items/{number}": made, "records/time": b"1"})
    second.finish(0, {"items/0": b"same", "records/time": b"2"})
    assert second.files == {name: first.files[name] for name in ("items/0", "records/time")} | second.files
    assert second.files["items/0"].path == first.files["items/0"].path
    with pytest.raises(RepeatError, match=r"shard 1 of .* was made twice") as caught:
        second.finish(1, {"items/1": b"other"})
    assert str(caught.value).count("items/1") == 3
    assert not caught.value.retryable


def test_a_score_of_a_service_may_differ_and_the_first_one_counts(tmp_path: Path) -> None:
    first, second = attempts(tmp_path)
    first.finish(0, {"items/0": b"0.5"})
    second.finish(0, {"items/0": b"0.6"}, repeatable=False)
    assert second.read("items/0") == b"0.5"


def test_a_worker_takes_over_a_marked_shard_without_reporting_it_as_made(tmp_path: Path) -> None:
    first, second = attempts(tmp_path)
    told: list[int] = []
    first.told = second.told = told.append
    first.finish(0, {"items/0": b"a"})
    assert (second.take_over(0), second.take_over(1)) == (True, False)
    assert second.read("items/0") == b"a"
    assert told == [0]


def test_a_shard_whose_file_is_gone_is_not_taken_over(tmp_path: Path) -> None:
    first, second = attempts(tmp_path)
    first.finish(0, {"items/0": b"a", "items/1": b"b"})
    remove(first.url(first.files["items/1"].path))
    assert not second.take_over(0)
    assert second.files == {}
    second.finish(0, {"items/0": b"a", "items/1": b"b"})
    assert second.read("items/1") == b"b"
