"""A few of the seeded kills of ``python -m tests.faults``, in the place that is cheapest."""

from pathlib import Path

import pytest

from tests.faults.bases import Bases
from tests.faults.kill import SAME, play

pytestmark = pytest.mark.processes


def test_a_preparation_that_is_killed_at_seeded_moments_goes_on(tmp_path: Path):
    case = play("preprocess", 0, Bases(tmp_path))
    assert case.outcome == SAME
    assert [kill for kill in case.kills if kill.change > 0]
    assert all(kill.killed for kill in case.kills)
