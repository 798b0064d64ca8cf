"""Scores of a rollout that is still being made: the stage takes them of the samples that it was given."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.rewards import ocr, pixel_statistics, remote
from cosmos_rl_core.storage.sealed import seal, unseal
from stages import contracts
from stages.artifacts.generations import invalidate
from stages.scoring.overlap import Ahead
from tests.reward_server import RewardServer
from tests.stages.artifacts.test_damaged_work import Dying, Killed
from tests.stages.scored_ahead import JPEG, UNITS, Both, Turns, flipped
from tests.stages.test_reward import table_of

GROUPWISE: RewardOptions = pixel_statistics.Options(name="pixel_statistics")
"""Its prompts of four samples lie in two units of three each."""


def test_scores_made_ahead_have_the_bytes_of_scores_made_afterwards(tmp_path: Path):
    both = Both(tmp_path, JPEG)
    both.score_ahead(0, 2, 1)
    assert len(both.shards) == 3
    both.require_equal(3, UNITS)
    assert both.shards == []


def test_a_prompt_of_a_groupwise_reward_is_scored_when_its_last_unit_is_there(tmp_path: Path):
    both = Both(tmp_path, GROUPWISE)
    began = both.ahead
    seen: list[int] = []

    def finish(*numbers: int) -> None:
        seen.append(len(both.shards))
        for number in numbers:
            both.rollout.finish(number)

    # Units 0 and 1 have the first prompt, 1 and 2 the second, 2 and 3 the third.
    began.run(Turns(tmp_path / "ahead", partial(finish, 1, 0), partial(finish, 2), both.rollout.rest))
    assert seen == [0, 1]
    assert len(both.shards) == 2
    both.require_equal(2, 3)
    details = table_of(str(tmp_path / "reward"), contracts.Reward.ANSWERS)["details"]
    assert all("group_diversity" in json.loads(one) for one in details)


def test_several_processes_score_each_portion_once(tmp_path: Path):
    both = Both(tmp_path, JPEG)
    for number in range(UNITS):
        both.rollout.finish(number)
    counts: list[int] = []
    for share in range(2):
        nothing = [lambda: None] * 3
        Ahead(both.rollout.request, both.request(expected=True), share, 2).run(Turns(tmp_path / "ahead", *nothing))
        counts.append(len(both.shards))
    assert counts == [2, 4]
    both.rollout.commit()
    both.require_equal(4, UNITS)


def require_rest_after_a_kill(both: Both, folder: Path) -> None:
    """Scoring that is killed keeps the first of two units, and makes the other when it is started again."""
    for number in (0, 1):
        both.rollout.finish(number)
    with pytest.raises(Killed):
        both.ahead.run(Dying(folder / "ahead", ("scoring ahead", 1)))
    (first,) = both.shards
    written = first.read_bytes()
    both.ahead.run(Turns(folder / "ahead", lambda: None, lambda: None, both.rollout.rest))
    assert len(both.shards) == 2
    # The calls stored with the scores have seconds, which a second scoring would change.
    assert first.read_bytes() == written
    both.require_equal(2, UNITS)


def test_scoring_that_is_killed_goes_on_with_the_rest_when_started_again(tmp_path: Path):
    require_rest_after_a_kill(Both(tmp_path, JPEG), tmp_path)


def test_units_that_the_rollout_did_not_keep_leave_no_score(tmp_path: Path):
    both = Both(tmp_path, JPEG)
    both.rollout.finish(0)
    with pytest.raises(Killed):
        both.ahead.run(Dying(tmp_path / "ahead", ("scoring ahead", 1)))
    assert len(both.shards) == 1
    # The retry did not fit into memory as it was, and draws other bits; then it is killed in its turn.
    generation = invalidate(both.rollout.slot, both.rollout.attempt.generation, "a test")
    both.rollout.begin(pictures=1)
    assert both.rollout.attempt.generation == generation
    both.score_ahead(0)
    assert len(both.shards) == 2
    both.require_equal(1, UNITS)
    assert len(both.shards) == 1


def test_a_rollout_that_begins_again_is_scored_on_its_new_samples(tmp_path: Path):
    both = Both(tmp_path, JPEG)

    def again() -> None:
        invalidate(both.rollout.slot, 1, "a test")
        both.rollout.begin(pictures=1)
        both.rollout.finish(0)

    both.ahead.run(Turns(tmp_path / "ahead", partial(both.rollout.finish, 0), again, both.rollout.rest))
    assert len(both.shards) == 2
    both.require_equal(1, UNITS)


def half(shard: Path, _: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:100])


def of_another_unit(shard: Path, other: Path) -> None:
    shard.write_bytes(other.read_bytes())


def named_for_it(shard: Path, other: Path) -> None:
    """Another unit's scores, under a seal that says they are of this one."""
    mine, its = (unseal(path.read_bytes(), "ahead", "") for path in (shard, other))
    shard.write_bytes(seal("ahead", its | {"portion": mine["portion"]}))


def of_another_slot(shard: Path, _: Path) -> None:
    shard.write_bytes(seal("ahead", unseal(shard.read_bytes(), "ahead", "") | {"place": "elsewhere"}))


@pytest.mark.parametrize("damage", [flipped, half, of_another_unit, named_for_it, of_another_slot])
def test_a_damaged_shard_and_one_of_other_samples_are_scored_again(tmp_path: Path, damage: Callable[..., None]):
    both = Both(tmp_path, JPEG)
    both.score_ahead(0, 1)
    damage(*both.shards)
    both.require_equal(1, UNITS, "scored again: ")


def test_a_sample_that_cannot_be_scored_ahead_fails_as_in_the_stage(tmp_path: Path):
    # Without a word in quotes there is nothing to read. The first prompt's four samples lie in the first two units.
    texts = ("a sign", 'a sign "K7"', 'a sign "HC"')
    both = Both(tmp_path, ocr.Options(line_width=96), texts, max_failed_fraction=0.4)
    both.score_ahead(0, 1, 2)
    # Another attempt may score what failed.
    assert len(both.shards) == 1
    both.require_equal(1, UNITS)
    assert table_of(str(tmp_path / "reward"), contracts.Reward.SCORES)["valid"] == [False] * 4 + [True] * 8


def test_a_reward_that_has_scores_is_left_alone(tmp_path: Path):
    both = Both(tmp_path, JPEG)
    both.rollout.rest()
    both.score()
    invalidate(both.rollout.slot, 1, "a test")
    both.rollout.begin()
    both.rollout.finish(0)
    both.ahead.run(Turns(tmp_path / "ahead"))
    assert both.shards == []


def test_scores_made_ahead_by_another_scorer_of_a_service_are_not_taken(server: RewardServer, tmp_path: Path):
    options = remote.Options(reward_fn="fn", score_key="overall_reward", timeout_s=20)
    both = Both(tmp_path, options, scorer=remote.Reward(options).version)
    server.scorer = {"version": "1", "digest": "a" * 64}
    both.score_ahead(0, 1)
    assert len(both.shards) == 2
    server.scorer = {"version": "2", "digest": "b" * 64}
    both.require_equal(0, UNITS)
    assert {*table_of(str(tmp_path / "reward"), contracts.Reward.SCORES)["scorer"]} == {
        f"reward service, fn, {'b' * 64}"
    }


def test_scores_made_ahead_by_the_same_scorer_of_a_service_are_taken(server: RewardServer, tmp_path: Path):
    options = remote.Options(reward_fn="fn", score_key="overall_reward", timeout_s=20)
    both = Both(tmp_path, options, scorer=remote.Reward(options).version)
    server.scorer = {"version": "1", "digest": "a" * 64}
    both.score_ahead(0, 1, 2)
    asked = len(server.frames)
    both.score()
    assert len(server.frames) - asked == 1
    both.require_equal(0, UNITS)
