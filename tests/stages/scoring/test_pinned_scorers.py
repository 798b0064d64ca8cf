"""Scorers of reward services: asked for at first contact, pinned, sent with each frame, and no other's scores taken."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ArtifactError, ConfigError, UnavailableError
from cosmos_rl_core.rewards import remote
from cosmos_rl_core.rewards._base import Sample
from cosmos_rl_core.rewards._base.served import ScorerChangedError, ServedScorer
from cosmos_rl_core.rewards._remote.client import Client, Service
from stages import contracts
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome, read_status
from stages.execution.runner import execute
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from tests.reward_server import RewardServer
from tests.stages.artifacts.test_damaged_work import Dying, Killed
from tests.stages.test_reward import scoring, table_of, write_units

FIRST, SECOND = {"version": "1", "digest": "a" * 64}, {"version": "2", "digest": "b" * 64}
PICTURES = [np.full((1, 8, 8, 3), value, np.uint8) for value in (1, 2, 3)]


def options(**more: Any) -> remote.Options:
    return remote.Options(reward_fn="fn", score_key="overall_reward", timeout_s=20, **more)


class Scoring:
    """A stage that scores three pictures, each a unit, by the service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prompts = tuple(Prompt(id=f"p{number}", text="x", metadata={"count": number}) for number in range(3))
        planned = plan_samples(prompts, 1, run_seed=0, iteration=None)
        stored = [with_media(s, one, None, {"policy": "c"}) for s, one in zip(planned, PICTURES, strict=True)]
        self.source = write_units(str(folder / "rollout"), stored, 1)

    def request(self, slot: str = "scores") -> Request:
        return scoring(str(self.folder / slot), self.source, options=options())

    def make(self, slot: str = "scores", *, accept: bool = False, outcome: type[Outcome] = Outcome) -> Manifest:
        how = Execution(scorer_record=str(self.folder / "scorers"), accept_scorer=accept)
        reports = outcome(self.folder / "outcome", 0)
        return execute(self.request(slot), how, reports)

    def scorers(self, slot: str = "scores") -> list[str]:
        return table_of(str(self.folder / slot), "scores.parquet")["scorer"]

    @property
    def notes(self) -> tuple[str, ...]:
        status = read_status(self.folder / "outcome")
        assert status is not None
        return tuple(status.notes)


class DiesAfterOne(Dying):
    """Killed after the first unit."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, ("scoring", 1))


def test_the_scorer_is_pinned_at_first_contact_and_sent_with_every_frame(server: RewardServer, tmp_path: Path):
    server.scorer = FIRST
    stage = Scoring(tmp_path)
    stage.make()
    assert [frame.about["scorers"] for frame in server.frames] == [{"fn": "a" * 64}] * 3
    assert stage.scorers() == [f"reward service, fn, {'a' * 64}"] * 3
    assert [path.name for path in (tmp_path / "scorers").iterdir()] == ["remote-fn-overall_reward.1.json"]


def test_metadata_goes_to_a_service_that_takes_it_and_to_no_other(server: RewardServer, tmp_path: Path):
    stage = Scoring(tmp_path)
    server.scorer = FIRST | {"metadata": True}
    stage.make("one")
    # It is no part of who scores: a service that takes it no more is the same one.
    server.scorer = FIRST
    stage.make("two")
    found = [frame.about.get("metadata") for frame in server.frames]
    assert sorted(found[:3], key=str) == [[{"count": 0}], [{"count": 1}], [{"count": 2}]]
    assert found[3:] == [None, None, None]
    assert stage.scorers("one") == stage.scorers("two")


def test_a_service_that_names_no_scorer_gets_unchanged_frames(server: RewardServer, tmp_path: Path):
    stage = Scoring(tmp_path)
    stage.make()
    assert [{"scorers", "metadata"} & {*frame.about} for frame in server.frames] == [set()] * 3
    assert stage.scorers() == ["reward service, fn"] * 3


def test_another_scorer_stops_the_run_until_it_is_accepted_for_new_scores(server: RewardServer, tmp_path: Path):
    stage = Scoring(tmp_path)
    server.scorer = FIRST
    first = stage.make()
    server.scorer = SECOND
    with pytest.raises(ConfigError, match=r"scored by fn 1 \(aaaaaaaaaaaa\), now it is fn 2 \(bbbbbbbbbbbb\)"):
        stage.make("more")
    assert len(server.frames) == 3
    accepted = stage.make("more", accept=True)
    assert accepted.content != first.content
    assert stage.scorers("more") == [f"reward service, fn, {'b' * 64}"] * 3
    assert any("accepted another scorer" in note for note in stage.notes)
    # Current artifacts stay, and the next stage needs no flag.
    assert stage.make() == first
    stage.make("third")
    server.scorer = None
    with pytest.raises(ConfigError, match=r"fn 2 \(bbbbbbbbbbbb\), now it is a service that names no scorer"):
        stage.make("fourth")


def test_a_stage_half_scored_by_one_scorer_is_never_finished_by_another(server: RewardServer, tmp_path: Path):
    stage = Scoring(tmp_path)
    server.scorer = FIRST
    with pytest.raises(Killed):
        stage.make(outcome=DiesAfterOne)
    server.scorer = SECOND
    stage.make(accept=True)
    assert stage.scorers() == [f"reward service, fn, {'b' * 64}"] * 3
    assert [frame.about["scorers"]["fn"] for frame in server.frames].count("b" * 64) == 3


def test_a_killed_stage_keeps_the_scores_of_the_same_scorer(server: RewardServer, tmp_path: Path):
    stage = Scoring(tmp_path)
    server.scorer = FIRST
    with pytest.raises(Killed):
        stage.make(outcome=DiesAfterOne)
    stage.make()
    assert len(table_of(str(tmp_path / "scores"), contracts.Reward.CALLS)["failed"]) == 2


def test_a_damaged_pin_is_damage_and_pins_nothing(server: RewardServer, tmp_path: Path):
    stage = Scoring(tmp_path)
    server.scorer = FIRST
    stage.make()
    (pin,) = (tmp_path / "scorers").iterdir()
    pin.write_bytes(pin.read_bytes().replace(b"aaaa", b"aaab"))
    with pytest.raises(ArtifactError):
        stage.make("more")


def held(digest: str = "a" * 64) -> remote.Reward:
    reward = remote.Reward(options())
    reward.hold_to(ServedScorer("fn", "1", digest))
    return reward


def samples(count: int = 1) -> list[Sample]:
    return [Sample(f"s{i}", "p", "x", PICTURES[i]) for i in range(count)]


def test_a_lost_request_is_sent_again_and_fails_no_sample(server: RewardServer):
    server.lost = {"uuid-0", "uuid-1"}
    found = remote.Reward(options()).score(samples(2))
    assert [entry["overall_reward"] for entry in found if isinstance(entry, dict)] == [1.0, 2.0]
    assert len(server.frames) == 3


def test_a_service_without_the_reward_is_a_mistake_that_lists_what_it_has(server: RewardServer):
    server.scorer = FIRST
    with pytest.raises(ConfigError, match="the reward service has no 'other'; known: dance_grpo, fn"):
        remote.Reward(remote.Options(reward_fn="other")).scorer()
    with Client(Service.from_environment(), 5) as client:
        assert client.check().endswith("; fn 1 (aaaaaaaaaaaa), dance_grpo 1 (aaaaaaaaaaaa)")


def test_a_scorer_that_does_not_load_in_time_is_unavailable_and_says_why(server: RewardServer):
    server.scorer = {"version": "", "digest": "", "ready": False, "error": "fn does not load: no weights here"}
    reward = remote.Reward(remote.Options(reward_fn="fn", timeout_s=0.1))
    with pytest.raises(UnavailableError, match=r"did not load fn within 0\.1 s: fn does not load: no weights here"):
        reward.scorer()


def test_a_failure_of_another_scorer_stops_the_run_and_fails_no_sample(server: RewardServer):
    server.scorer = FIRST
    reward = held()
    told = {
        "error": "the scorer changed after the request was accepted",
        "scores": None,
        "scorer": {"name": "fn", **SECOND},
    }
    server.pull_answers = [(200, told)]
    with pytest.raises(ScorerChangedError, match=r"now it is fn 2 \(bbbbbbbbbbbb\)"):
        reward.score(samples())


def test_a_failure_before_a_scorer_has_loaded_fails_its_sample_alone(server: RewardServer):
    server.scorer = FIRST
    told = {"error": "fn does not load", "scores": None, "scorer": {"name": "fn", "version": "", "digest": ""}}
    server.pull_answers = [(200, told)]
    (found,) = held().score(samples())
    assert "fn does not load" in str(found)


def test_the_recipes_scorer_version_counts_if_the_service_names_none():
    assert remote.Reward(options()).version == "reward service, fn"
    assert remote.Reward(options(scorer_version="2025-08")).version == "reward service, fn, 2025-08"
    assert "scorer_version" not in options().identity()
