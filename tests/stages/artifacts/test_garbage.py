"""Files of a slot that nothing needs."""

import time
from pathlib import Path

from stages.artifacts.garbage import garbage
from tests.stages.scored_ahead import JPEG, Both, flipped


def test_unused_shards_are_garbage_once_the_reward_has_scores(tmp_path: Path):
    both = Both(tmp_path, JPEG)
    both.score_ahead(0, 1)
    name = f"ahead/{both.shards[0].name}"
    flipped(both.shards[0], both.shards[0])
    slot, later = str(tmp_path / "reward"), time.time() + 60
    assert garbage(slot, superseded=False, before_s=later).old == {}
    both.score()
    assert [*garbage(slot, superseded=False, before_s=later).old] == [name]
    assert [*garbage(slot, superseded=False, before_s=0).young] == [name]
