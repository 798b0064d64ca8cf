"""The clock of a stage's process: every second has one cause, and bytes are counted where they pass."""

import time

import pytest

from cosmos_rl_core.processes import TRAFFIC, age_s
from cosmos_rl_core.storage import store
from stages.execution.spending import Clock

PAUSE_S = 0.02


def test_every_second_of_a_stage_has_one_cause(tmp_path):
    began_s, clock = age_s(), Clock()
    before = clock.spent()
    time.sleep(PAUSE_S)
    clock.turn("load")
    clock.saw("reading current", 0)
    time.sleep(2 * PAUSE_S)
    clock.saw("sampling", 0)
    clock.saw("sampling", 0)
    with TRAFFIC.waiting():
        time.sleep(PAUSE_S)
    time.sleep(3 * PAUSE_S)
    clock.saw("sampling", 8)
    time.sleep(4 * PAUSE_S)
    store.write(str(tmp_path / "a"), bytes(1000))
    store.write_stream(str(tmp_path / "b"), [bytes(10), memoryview(bytes(20))])
    assert store.read(str(tmp_path / "a"), 0, 300) == bytes(300)
    clock.finished([[5, 7]])
    spent, life_s = clock.spent(), age_s()
    parts = (spent.imports_s, spent.load_s, spent.first_step_s, spent.busy_s, spent.waiting_s)
    # Sleeps may be longer than asked for, never shorter.
    assert all(part > 0.99 * count * PAUSE_S for part, count in zip(parts, (1, 2, 3, 4, 1), strict=True))
    assert (spent.read_bytes, spent.written_bytes) == (305, 1037)
    assert spent.seconds == pytest.approx(life_s, abs=0.02)
    assert before.interpreter_s == pytest.approx(began_s, abs=0.02)


def test_a_stage_without_steps_is_busy_from_its_imports_on():
    clock = Clock()
    clock.turn("load")
    time.sleep(PAUSE_S)
    clock.finished()
    spent = clock.spent()
    assert (spent.load_s, spent.first_step_s) == (0.0, 0.0)
    assert spent.busy_s > 0.99 * PAUSE_S
