"""Scorers of services that are held to: no other's scores are taken."""

import threading
from collections.abc import Iterator

import pytest

from cosmos_rl_core.rewards import remote
from cosmos_rl_core.rewards._base.served import ScorerChangedError, ServedScorer
from tests.reward_server import RewardServer, used_reward_server
from tests.stages.scoring.test_pinned_scorers import FIRST, SECOND, held, options, samples


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    """A service of one machine."""
    with used_reward_server(monkeypatch) as service:
        service.replica = None
        yield service


@pytest.mark.parametrize("answered_by", [SECOND, None])
def test_an_answer_of_another_scorer_is_never_taken(server: RewardServer, answered_by: dict[str, str] | None):
    server.scorer = FIRST
    reward = held()
    # The service changes its scorer after it has accepted the frame.
    server.scores = lambda frame: setattr(server, "scorer", answered_by) or {"overall_reward": [1.0]}
    with pytest.raises(ScorerChangedError, match="Scores of two scorers cannot be compared"):
        reward.score(samples())


def test_a_frame_that_the_service_refuses_names_both_scorers(server: RewardServer):
    server.scorer = SECOND
    with pytest.raises(ScorerChangedError, match=r"\(aaaaaaaaaaaa\), now it is fn 2 \(bbbbbbbbbbbb\)"):
        held().score(samples())


def test_a_scorer_that_is_loading_is_waited_for(server: RewardServer, monkeypatch: pytest.MonkeyPatch):
    server.scorer = {"version": "", "digest": "", "ready": False}
    monkeypatch.setattr(remote, "RETRY_DELAYS_S", (0.01, 0.02))
    loaded = threading.Timer(0.1, setattr, (server, "scorer", FIRST))
    loaded.start()
    assert remote.Reward(options()).scorer() == ServedScorer("fn", "1", "a" * 64)
    loaded.join()
