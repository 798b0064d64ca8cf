"""Portions whose samples a service has at once: it never waits at the border of two, and nothing else changes."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.rewards import remote
from cosmos_rl_core.rewards.remote import IN_FLIGHT
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.samples import all_rows
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from stages.scoring.portions import Portion, portions_of
from stages.scoring.processes import UNSENT, side_by_side
from stages.scoring.scorer import Made, Scorer
from tests.reward_server import Frame, RewardServer, Withholding, brightness, used_reward_server
from tests.stages.scored_ahead import eventually
from tests.stages.test_reward import scoring, table_of, write_units

COUNT = 41
"""Number of samples, which lie in units of two and one."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    with used_reward_server(monkeypatch) as service:
        yield service


class Pictures:
    """Pictures of one value each, 0, 1, ..., and their scoring by the service, which tells the value."""

    def __init__(self, folder: Path, per_shard: int = 2, **settings: Any) -> None:
        self.folder = folder
        prompts = tuple(Prompt(id=f"p{number:02d}", text="x") for number in range(COUNT))
        planned = plan_samples(prompts, 1, run_seed=0, iteration=None)
        stored = [
            with_media(s, np.full((1, 2, 2, 3), value, np.uint8), None, {"policy": "c"})
            for value, s in enumerate(planned)
        ]
        source = write_units(str(folder / "rollout"), stored, per_shard)
        options = remote.Options(reward_fn="fn", score_key="overall_reward", batch_size=1, timeout_s=600.0)
        version = remote.Reward(options).version
        self.request: Request = scoring(str(folder / "scores"), source, options=options, scorer=version, **settings)

    def score(self, processes: int = 1) -> str:
        """Return the content of the scores."""
        return execute(self.request, Execution(processes=processes), Outcome(self.folder / "outcome", 0)).content

    def portions(self, scorer: Scorer) -> list[Portion]:
        rows = all_rows(Artifact(self.request.one("samples")))
        return portions_of(rows, scorer.part, groupwise=scorer.groupwise).all

    def column(self, name: str, table: str = contracts.Reward.SCORES) -> list[Any]:
        return table_of(self.request.slot, table)[name]


@pytest.mark.parametrize("windows", [1, 2])
def test_the_service_has_a_full_window_while_samples_are_left(server: RewardServer, tmp_path: Path, windows: int):
    server.scores = withholding = Withholding(server, COUNT, windows * IN_FLIGHT)
    pictures = Pictures(tmp_path)
    pictures.score(windows)
    assert (withholding.answered, withholding.most) == (COUNT, windows * IN_FLIGHT)
    assert pictures.column("score") == [float(value) for value in range(COUNT)]
    assert pictures.column("shard_samples", contracts.Reward.CALLS) == [2] * 20 + [1]


def test_portions_scored_together_have_the_tables_of_portions_scored_alone(server: RewardServer, tmp_path: Path):
    server.scores = Withholding(server, COUNT, IN_FLIGHT)
    pictures = Pictures(tmp_path)
    scorer = Scorer(pictures.request)
    portions = pictures.portions(scorer)
    together = {portion.number: made for portion, made in side_by_side(scorer, pictures.request, portions, 1, None)}
    server.frames.clear()
    server.scores = Withholding(server, COUNT, 1)
    for portion in portions:
        alone = scorer.score(portion)
        assert together[portion.number][:2] == alone[:2]
        assert [call | {"seconds": 0} for call in together[portion.number].calls] == [
            call | {"seconds": 0} for call in alone.calls
        ]


def test_a_request_that_fails_fails_its_own_samples_only(server: RewardServer, tmp_path: Path):
    def but_the_seventh(frame: Frame) -> dict[str, Any] | None:
        return {} if frame.array.max() == 7 else brightness(frame)

    server.scores = but_the_seventh
    pictures = Pictures(tmp_path, max_attempts=2, max_failed_fraction=0.1)
    pictures.score()
    assert pictures.column("valid") == [value != 7 for value in range(COUNT)]
    # The one with the other sample of its unit is tried again, and no other.
    calls = pictures.column("attempt", contracts.Reward.CALLS), pictures.column("failed", contracts.Reward.CALLS)
    assert [*zip(*calls, strict=True)] == [*[(0, 0)] * 3, (0, 1), (1, 1), *[(0, 0)] * 17]


class Counting(Scorer):
    """Counts portions that have begun and were not answered; each is a request."""

    def __init__(self, request: Request, service: Withholding) -> None:
        super().__init__(request)
        self.service, self.begun, self.most = service, 0, 0

    def score(self, portion: Portion, ask: Any = None, read: Any = None) -> Made:
        self.begun += 1
        self.most = max(self.most, self.begun - self.service.answered)
        return super().score(portion, ask, read)


def test_memory_holds_the_services_portions_and_at_most_two_more(server: RewardServer, tmp_path: Path):
    server.scores = withholding = Withholding(server, COUNT, IN_FLIGHT)
    pictures = Pictures(tmp_path, per_shard=1)
    scorer = Counting(pictures.request, withholding)
    found = side_by_side(scorer, pictures.request, pictures.portions(scorer), 1, None)
    assert len({portion.number for portion, _ in found}) == COUNT
    assert IN_FLIGHT < scorer.most <= IN_FLIGHT + UNSENT


def test_an_error_that_is_no_samples_fault_ends_all_waiting_portions(server: RewardServer, tmp_path: Path):
    server.scores = lambda frame: None
    server.pull_answers = [(400, {})] * 20 + [(405, {"detail": "wrong"})]
    with pytest.raises(ConfigError, match="405"):
        Pictures(tmp_path).score()
    names = ("frame_", "request_", "portion_")
    eventually(lambda: not any(thread.name.startswith(names) for thread in threading.enumerate()))
