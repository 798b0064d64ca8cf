"""Portions of samples: whole prompts for groupwise rewards, and several processes that score side by side."""

import json
import threading
from collections import defaultdict

import numpy as np
import pytest

from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import jpeg, pixel_statistics, remote
from cosmos_rl_core.rewards._base import Sample
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.samples import all_rows
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from stages.scoring.portions import portions_of
from stages.scoring.processes import side_by_side
from stages.scoring.scorer import DECODED_AHEAD_BYTES, Scorer
from tests.stages.artifacts.test_damaged_work import Dying, Killed
from tests.stages.test_reward import CLOSE, RIGHT, run, scoring, table_of, write_samples, write_units

JPEG = jpeg.Options(name="jpeg")


class Statistics:
    """Pictures of three prompts of three samples, cut into units of ``per_shard``, and their statistics."""

    def __init__(self, folder, per_shard):
        prompts = tuple(Prompt(id=f"p{number}", text="x") for number in range(3))
        rng = np.random.default_rng(0)
        self.stored = [
            with_media(s, rng.integers(0, 256, (1, 16, 16, 3), np.uint8), None, {"policy": "c"})
            for s in plan_samples(prompts, 3, run_seed=0, iteration=None)
        ]
        self.source = write_units(str(folder / f"rollout-{per_shard}"), self.stored, per_shard)
        options = pixel_statistics.Options(name="pixel_statistics")
        self.request = scoring(str(folder / f"scores-{per_shard}"), self.source, options=options)

    def answers(self):
        return table_of(self.request.slot, contracts.Reward.ANSWERS)


def test_a_groupwise_reward_gets_all_samples_of_a_prompt_however_they_were_cut(tmp_path):
    cuts = [Statistics(tmp_path, per_shard) for per_shard in (2, 4, 9)]
    manifests = [run(one.request, tmp_path)[0] for one in cuts]
    assert len({manifest.content for manifest in manifests}) == 1
    pictures = [Sample(s.sample_id, s.row["prompt_id"], "x", s.pixels) for s in cuts[0].stored]
    whole = pixel_statistics.Reward(pixel_statistics.Options(name="pixel_statistics")).score(pictures)
    assert all(isinstance(entry, dict) and "group_diversity" in entry for entry in whole)
    for one in cuts:
        assert [json.loads(details) for details in one.answers()["details"]] == whole
    calls = table_of(cuts[0].request.slot, contracts.Reward.CALLS)
    assert calls["shard_samples"] == [3, 3, 3]


def test_a_prompt_of_a_groupwise_reward_is_tried_again_whole(tmp_path):
    one = Statistics(tmp_path, 2)
    scorer = Scorer(
        one.request.model_copy(update={"config": one.request.config.model_copy(update={"max_attempts": 2})})
    )
    asked = []

    class Failing(pixel_statistics.Reward):
        def score(self, samples: list[Sample]) -> list[dict[str, float] | Exception]:
            asked.append([sample.sample_id for sample in samples])
            return [ValueError("no") if len(asked) == 1 and i == 1 else {"pixel_statistics": 1.0} for i in range(3)]

    scorer.reward = Failing(pixel_statistics.Options(name="pixel_statistics"))
    first = portions_of(all_rows(Artifact(one.source)), scorer.part, groupwise=True).all[0]
    made = scorer.score(first)
    assert asked == [first.ids, first.ids]
    assert [row["score"] for row in made.scores] == [1.0, 1.0, 1.0]


@pytest.mark.processes
def test_several_processes_write_the_scores_of_one_and_keep_finished_portions(tmp_path):
    one = Statistics(tmp_path, 2)
    alone, _ = run(one.request, tmp_path)
    request = one.request.model_copy(update={"slot": str(tmp_path / "together")})
    with pytest.raises(Killed):
        execute(request, Execution(processes=2), Dying(tmp_path / "outcome", ("scoring", 1)))
    together = execute(request, Execution(processes=2), Outcome(tmp_path / "outcome", 0))
    assert together.content == alone.content
    assert len(table_of(request.slot, contracts.Reward.CALLS)["failed"]) == 2


@pytest.mark.processes
def test_a_failure_in_one_of_several_processes_keeps_its_kind(tmp_path, monkeypatch):
    monkeypatch.delenv("REMOTE_REWARD_ENQUEUE_URL", raising=False)
    source = write_samples(str(tmp_path / "rollout"), [RIGHT, CLOSE], per_shard=1)
    options = remote.Options(reward_fn="fn")
    request = scoring(str(tmp_path / "scores"), source, options=options, scorer=remote.Reward(options).version)
    with pytest.raises(ConfigError, match="REMOTE_REWARD_ENQUEUE_URL is not set"):
        execute(request, Execution(processes=2), Outcome(tmp_path / "outcome", 0))


PATIENCE_S = 60.0


class Watched:
    """The files of an artifact, and which of them were read."""

    def __init__(self, source):
        self.artifact = Artifact(source)
        self.was_read = defaultdict(threading.Event)

    def entry(self, name):
        return self.artifact.entry(name)

    def json(self, name):
        return self.artifact.json(name)

    def read(self, name):
        self.was_read[name].set()
        return self.artifact.read(name)


def test_the_next_unit_is_read_and_prepared_while_one_is_scored(tmp_path):
    """A reward that goes on only when the unit after its own was read and decoded would wait for ever otherwise."""
    source = Statistics(tmp_path, 3).source
    watched, request = Watched(source), scoring(str(tmp_path / "scores"), source, options=JPEG)
    scorer, expected, told = Scorer(request, watched), [], threading.Semaphore(0)
    portions = portions_of(all_rows(watched.artifact), scorer.part, groupwise=False).all

    class Waiting(jpeg.Reward):
        def expect(self, samples):
            expected.extend(samples)
            told.release()

        def score(self, samples):
            assert told.acquire(timeout=PATIENCE_S)
            assert all(any(sample is other for other in expected) for sample in samples)
            if samples[0].sample_id != portions[-1].ids[0]:
                number = [portion.ids[0] for portion in portions].index(samples[0].sample_id) + 1
                assert watched.was_read[f"media/{number:05d}.tar"].wait(PATIENCE_S)
            return super().score(samples)

    alone = [Scorer(request, watched.artifact).score(portion) for portion in portions]
    scorer.reward = Waiting(JPEG)
    made = list(side_by_side(scorer, request, portions, 1, None))
    assert [portion for portion, _ in made] == portions
    assert [found[:2] for _, found in made] == [found[:2] for found in alone]


def test_no_more_of_a_unit_is_decoded_ahead_than_the_memory_for_it_holds(tmp_path):
    one = Statistics(tmp_path, 3)
    scorer, first = Scorer(one.request), one.stored[0].pixels.nbytes
    portion = portions_of(all_rows(Artifact(one.source)), scorer.part, groupwise=False).all[0]
    ids = portion.ids
    for most, decoded in ((0, []), (1, ids[:1]), (first, ids[:1]), (first + 1, ids[:2]), (DECODED_AHEAD_BYTES, ids)):
        read = scorer.read(portion, most)
        assert [*read.decoded] == decoded
        assert scorer.score(portion, read=read)[:2] == scorer.score(portion)[:2]
