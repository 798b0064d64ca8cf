"""Workers that are handed units."""

import threading
from pathlib import Path

import pytest

from flows.launchers._handing import Handing
from stages.execution.context import Alone
from stages.execution.handing import HandedUnits, LeftError


def test_a_worker_with_other_numerics_takes_nothing_and_says_why(tmp_path: Path) -> None:
    handing = Handing(tmp_path)
    first = HandedUnits(tmp_path, 0, Alone(), {"device": "one", "world_size": 1})
    with pytest.raises(LeftError, match="device"):
        HandedUnits(tmp_path, 1, Alone(), {"device": "other", "world_size": 1})
    assert handing.unlike == ["worker 1: device: 'one' -> 'other'"]
    assert handing.left == {1}
    hands = first.hands(2, 1)
    made: list[int] = []
    for some in hands:
        made += some
        # As a thread that writes does.
        threading.Thread(target=first.made, args=(some[0],)).start()
    assert made == [0, 1]
    first.close()
    handing.close()
