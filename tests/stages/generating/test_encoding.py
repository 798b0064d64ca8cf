"""Threads that encode and write samples while the next ones are sampled."""

import threading
from collections.abc import Callable
from threading import Event, current_thread, main_thread
from typing import Any

import pytest

from stages.formats.samples import StoredSample
from stages.generating.encoding import UnitWriter
from stages.generating.plans import TILES_AHEAD

WAIT_S = 30.0


def sample(name: str) -> StoredSample:
    return StoredSample({"sample_id": name, "finite": False})


def test_encoding_and_writing_run_in_other_threads_while_the_next_tile_is_made():
    """The first tile's encoding ends only when the next tile is made, so that on one thread it would never end."""
    next_is_made, threads, written = Event(), [], []

    def encode() -> StoredSample:
        assert next_is_made.wait(WAIT_S)
        threads.append(current_thread())
        return sample("first")

    def write(number: int, made: list[StoredSample]) -> None:
        threads.append(current_thread())
        written.append((number, [one.sample_id for one in made]))

    with UnitWriter({0: 1, 1: 1}, write) as writer:
        writer.take(0, [encode])
        next_is_made.set()
        writer.take(1, [lambda: sample("second")])
    assert written == [(0, ["first"]), (1, ["second"])]
    assert main_thread() not in threads


def test_units_hold_their_samples_in_order_whichever_sample_is_encoded_first():
    second_done, written = Event(), []

    def late() -> StoredSample:
        assert second_done.wait(WAIT_S)
        return sample("a")

    def early() -> StoredSample:
        second_done.set()
        return sample("b")

    with UnitWriter({5: 3}, lambda number, made: written.append((number, [one.sample_id for one in made]))) as writer:
        writer.take(5, [late, early])
        writer.take(5, [lambda: sample("c")])
    assert written == [(5, ["a", "b", "c"])]


def test_few_tiles_wait_to_be_encoded():
    """The writer takes a further tile only when the oldest is encoded."""
    release, waiting, most = Event(), 0, []
    lock = threading.Lock()

    def encoding() -> Callable[[], StoredSample]:
        nonlocal waiting
        with lock:
            waiting += 1
            most.append(waiting)

        def encode() -> StoredSample:
            nonlocal waiting
            assert release.wait(WAIT_S)
            with lock:
                waiting -= 1
            return sample("any")

        return encode

    with UnitWriter(dict.fromkeys(range(10), 1), lambda number, made: None) as writer:
        for number in range(TILES_AHEAD):
            writer.take(number, [encoding()])
        threading.Timer(0.2, release.set).start()
        for number in range(TILES_AHEAD, 10):
            writer.take(number, [encoding()])
    # The one that was just made is not taken yet.
    assert max(most) == TILES_AHEAD + 1


@pytest.mark.parametrize("where", ["encode", "write"])
def test_an_error_in_a_thread_ends_the_work(where: str):
    def fail(*_: object) -> StoredSample:
        raise OSError("no space left")

    write: Any = fail if where == "write" else lambda number, made: None
    encode = fail if where == "encode" else lambda: sample("any")
    with pytest.raises(OSError, match="no space left"), UnitWriter({0: 1}, write) as writer:
        writer.take(0, [encode])


def test_nothing_is_written_after_an_error_in_the_caller():
    began, release, written = Event(), Event(), []

    def encode() -> StoredSample:
        began.set()
        assert release.wait(WAIT_S)
        return sample("any")

    def fail(writer: UnitWriter) -> None:
        writer.take(0, [encode])
        assert began.wait(WAIT_S)
        release.set()
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"), UnitWriter({0: 2}, lambda *unit: written.append(unit)) as writer:
        fail(writer)
    assert written == []
