"""Windows of the frames of clips."""

import pytest

from cosmos_rl_core.datasets._base import ItemError
from cosmos_rl_core.datasets._windows import Windows


def test_clips_take_frames_at_the_wanted_rate_from_evenly_spaced_windows():
    assert Windows(3).indices(10, 24.0) == [[0, 1, 2]]
    assert Windows(3, 3).indices(9, 24.0) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    # 24 frames a second, 12 wanted: every second one. 10 frames last until frame 8 at that rate.
    assert Windows(3, 2, 12.0).indices(10, 24.0) == [[0, 2, 4], [4, 6, 8]]
    assert Windows(4, fps=30.0).indices(4, 15.0) == [[0, 0, 1, 1]]
    assert Windows(1).indices(1, 0.0) == [[0]]
    for windows in (Windows(5), Windows(5, 3), Windows(5, 2, 10.0), Windows(5, 1, 60.0)):
        least = windows.least(24.0)
        assert max(max(one) for one in windows.indices(least, 24.0)) < least
        with pytest.raises(ItemError, match=f"{least - 1} frames, expected at least {least}"):
            windows.indices(least - 1, 24.0)


@pytest.mark.parametrize("frames", [250, 394])
def test_the_least_number_of_frames_holds_after_rounding(frames: int):
    windows = Windows(frames, 4, 12.0)
    least = windows.least(25.0)
    assert max(max(one) for one in windows.indices(least, 25.0)) < least
    with pytest.raises(ItemError, match=f"{least - 1} frames, expected at least {least}"):
        windows.indices(least - 1, 25.0)
