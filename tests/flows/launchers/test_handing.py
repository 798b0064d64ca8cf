"""Units of an elastic stage: who gets which, and who ends."""

import pytest

from flows.launchers._handing import Units
from stages.execution.handing import FINISH, LEAVE


def test_each_unit_is_handed_out_once_and_one_worker_makes_the_artifact_of_all() -> None:
    units = Units()
    assert (units.take(0, 1, 3), units.take(1, 2, 3)) == ([0], [1, 2])
    assert units.take(0, 1, 3) == []
    for worker, unit in ((0, 0), (1, 2), (1, 1)):
        assert not units.all_made
        units.finish(worker, unit)
    assert [units.take(worker, 1, 3) for worker in (1, 0, 1)] == [FINISH, LEAVE, FINISH]


def test_units_of_a_lost_worker_come_first_each_alone_with_an_idle_worker() -> None:
    units = Units()
    assert (units.take(0, 2, 5), units.take(1, 1, 5)) == ([0, 1], [2])
    assert units.give_back(0, lost=True) == [0, 1]
    assert units.take(1, 1, 5) == [], "it still has unit 2, and a second loss would not tell which one is the reason"
    assert [units.take(worker, 2, 5) for worker in (2, 2, 3)] == [[0], [], [1]]
    units.finish(2, 0)
    assert units.take(2, 2, 5) == [3, 4]


def test_a_unit_that_was_given_back_counts_no_loss_and_a_lost_last_worker_is_replaced() -> None:
    units = Units()
    assert units.take(0, 1, 1) == [0]
    units.give_back(0, lost=False)
    assert units.losses[0] == 0
    assert units.take(1, 1, 1) == [0]
    units.finish(1, 0)
    assert units.take(1, 1, 1) == FINISH
    assert not units.wait
    units.give_back(1, lost=True)
    assert units.wait
    assert units.take(2, 1, 1) == FINISH


def test_workers_that_cut_the_work_differently_are_an_error() -> None:
    units = Units()
    units.take(0, 1, 3)
    with pytest.raises(ValueError, match="cuts the work into 4 units, and others cut it into 3"):
        units.take(1, 1, 4)
