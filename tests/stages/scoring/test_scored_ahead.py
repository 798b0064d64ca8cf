"""Scores of a rollout that is still being made: the stage takes them of the samples that it was given."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.config.launch import LaunchConfig
from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.config.train import RewardOptions
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.rewards import jpeg, ocr, pixel_statistics, remote
from cosmos_rl_core.storage.sealed import seal, unseal
from flows.launchers._base import Job
from flows.launchers.overlap import EarlyScoring
from stages import contracts
from stages.artifacts.garbage import garbage
from stages.artifacts.generations import invalidate
from stages.artifacts.layouts import cut
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import MediaShape, ModelRef
from stages.execution.outcome import Outcome
from stages.formats.samples import StoredSample, unit_files
from stages.generating.encoding import with_media
from stages.generating.plans import planned
from stages.scoring.overlap import Ahead
from tests.hand_made import begin, commit, make, report
from tests.reward_server import RewardServer
from tests.stages.artifacts.test_damaged_work import Dying, Killed
from tests.stages.test_reward import run, scoring, table_of

PER_UNIT, UNITS = 3, 4
JPEG: RewardOptions = jpeg.Options(name="jpeg")
GROUPWISE: RewardOptions = pixel_statistics.Options(name="pixel_statistics")
"""Its prompts of four samples lie in two units of three each."""
LEFT_S = 60.0


class Rollout:
    """A rollout of three prompts of four samples, in four units, which a test finishes one after the other."""

    def __init__(self, folder: Path, texts: tuple[str, ...] = ("x",) * 3) -> None:
        prompts = tuple(Prompt(id=f"p{number}", text=text) for number, text in enumerate(texts))
        make(report(str(folder / "made")))
        source = input_of(str(folder / "made"))
        config = contracts.Rollout(
            model=ModelRef(path="none", adapter="none", digest="none"),
            lora=None,
            prompts=prompts,
            n_generation=4,
            media=MediaShape(size=(16, 16), frames=1),
            sample=SolverConfig(num_steps=2),
            batch_size=3,
            samples_per_shard=PER_UNIT,
        )
        inputs = {"policy": (source,), "embeddings": (source,)}
        self.slot = str(folder / "rollout")
        self.request = Request(stage="rollout", slot=self.slot, iteration=0, seed=0, config=config, inputs=inputs)
        self.begin()

    def begin(self, pictures: int = 0) -> None:
        """Begin an attempt. Samples have other pixels for other ``pictures``."""
        rng = np.random.default_rng(pictures)
        plans = planned(self.request)
        stored = [with_media(p, rng.integers(0, 256, (1, 16, 16, 3), np.uint8), None, {"policy": "c"}) for p in plans]
        self.units: list[list[StoredSample]] = cut(stored, PER_UNIT)
        layout = {"units": [[one.sample_id for one in unit] for unit in self.units], "tile": 3}
        self.attempt = begin(self.request, layout=layout)

    def finish(self, number: int) -> None:
        self.attempt.finish(number, unit_files(number, self.units[number]))

    def commit(self) -> None:
        commit(self.attempt)

    def rest(self) -> None:
        """Finish all units, and commit."""
        for number in range(UNITS):
            if not self.attempt.adopt(number):
                self.finish(number)
        self.commit()


class Turns(Outcome):
    """What the scoring says, after which the rollout each time goes on."""

    def __init__(self, folder: Path, *turns: Callable[[], None]) -> None:
        super().__init__(folder, 0)
        self.turns = [*turns]

    def progress(self, phase: str, step: int, total: int) -> None:
        super().progress(phase, step, total)
        self.turns.pop(0)()


class Both:
    """A rollout and its scoring by one reward; ``plain`` scores the same rollout without any shard."""

    def __init__(
        self, folder: Path, options: RewardOptions, texts: tuple[str, ...] = ("x",) * 3, **settings: Any
    ) -> None:
        self.folder, self.rollout = folder, Rollout(folder, texts)
        self.options, self.settings = options, settings

    def request(self, slot: str = "reward", *, expected: bool = False) -> Request:
        source = self.rollout.request.expected("index", "media") if expected else self.source
        return scoring(str(self.folder / slot), source, options=self.options, **self.settings)

    @property
    def source(self) -> Any:
        return input_of(self.rollout.slot, "index", "media")

    @property
    def ahead(self) -> Ahead:
        return Ahead(self.rollout.request, self.request(expected=True))

    @property
    def shards(self) -> list[Path]:
        return sorted((self.folder / "reward" / "ahead").glob("*.json"))

    def score_ahead(self, *numbers: int) -> None:
        """Score while the rollout finishes these units, then let it end."""
        first, *others = (partial(self.rollout.finish, number) for number in numbers)
        self.ahead.run(Turns(self.folder / "ahead", first, *others, self.rollout.rest))

    def score(self, slot: str = "reward") -> tuple[dict[str, str], list[str]]:
        """Return the digests of all files but of the calls, which have seconds, and what people were told."""
        manifest, notes = run(self.request(slot), self.folder)
        return {name: entry.sha256 for name, entry in manifest.files.items() if "calls" not in name}, notes

    def require_equal(self, taken: int, of: int, *others: str) -> None:
        """Require the bytes of a scoring without shards, of which so many were taken."""
        found, notes = self.score()
        said = [f"{taken} of {of} shards were scored while the rollout ran"] if taken else []
        assert [note for note in notes if not any(word in note for word in others)] == said
        assert found == self.score("plain")[0]
        assert len(table_of(str(self.folder / "plain"), contracts.Reward.SCORES)["score"]) == PER_UNIT * UNITS


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


def flipped(shard: Path, _: Path) -> None:
    shard.write_bytes(shard.read_bytes().replace(b'"score":', b'"score": ', 1))


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


def eventually(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LEFT_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.processes
def test_a_killed_scoring_process_is_noted_once_and_ends_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    both, notes = Both(tmp_path, JPEG), list[str]()
    both.rollout.finish(0)
    reward = Job(both.request(expected=True))
    with EarlyScoring(both.rollout.request, reward, LaunchConfig(), notes.append) as early:
        eventually(lambda: both.shards or not early.is_running())
        assert early.is_running()
        assert early.pid is not None
        os.kill(early.pid, signal.SIGKILL)
        eventually(lambda: not early.is_running())
        assert not early.is_running()
    expected = "reward: scoring while the rollout runs ended (killed, exit code -9); the stage scores the rest"
    assert notes == [expected]
    both.rollout.rest()
    both.require_equal(1, UNITS)
