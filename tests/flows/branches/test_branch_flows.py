"""Forks, re-scores and studies as flows: what they hand on, which runs they make, and how they end."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.errors import StageError
from flows.planning import requests
from flows.planning.plan import ForkOf, Settings, freeze, plan_of
from flows.planning.run import Run
from flows.studying.over_seeds import plan_of_study
from tests.flows.by_hand import planned_run, validated
from tests.hand_made import make

forks, rescores, studies = (import_module(f"flows.branches.{name}") for name in ("fork", "rescore", "study"))


def test_a_fork_is_trained_with_all_that_it_was_told(monkeypatch: pytest.MonkeyPatch):
    handed: list[Settings] = []
    monkeypatch.setattr(forks, "train", lambda settings: handed.append(settings) or "done")
    told: dict[str, Any] = {"iterations": 3, "overrides": ["train.seed=1"], "rewards": "r.toml", "cluster": "c.toml"}
    state = forks.fork.fn("hand", 1, "here", "mine", **told, remake=True)
    assert state.message == "done"
    expected = Settings(
        "", "here", "mine", 3, ("train.seed=1",), "c.toml", remake=True, fork=ForkOf("hand", 1, "r.toml")
    )
    assert handed == [expected]


def test_a_re_score_of_samples_that_are_not_there_fails_with_what_there_is(recipe: Any, tmp_path: Path):
    run = planned_run(recipe, tmp_path)
    state = rescores.rescore.fn("hand", "jpeg", run.store_url)
    assert state.is_failed()
    assert "hand has no rollout" in state.message


def test_a_study_makes_each_run_and_reports_those_that_ended_early(
    recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made: list[tuple[str | None, int]] = []
    path, url = validated(recipe, tmp_path), str(tmp_path / "store")
    expected, _ = plan_of_study(Settings(path, url), seeds="0-2")

    def train(settings: Settings) -> str:
        run = Run(freeze(plan_of(settings), settings.store), settings.store)
        made.append((settings.run_id, run.recipe.train.seed))
        make(requests.policy(run), {"current/w": b"start"})
        if run.recipe.train.seed == 1:
            raise StageError.of("diverged", "the loss is nan")
        return "done"

    monkeypatch.setattr(studies, "train", train)
    state = studies.study.fn(path, "0-2", url)
    assert state.is_completed(), state.message
    assert made == [(one.run, one.seed) for one in expected.members]
    assert "run 2 of 3: " in (said := capsys.readouterr().out)
    assert "ended at policy 0: the loss is nan" in said


def test_another_failure_of_a_run_ends_its_study(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def train(settings: Settings) -> str:
        raise StageError.of("crash", "it broke")

    monkeypatch.setattr(studies, "train", train)
    state = studies.study.fn(validated(recipe, tmp_path), "0-1", str(tmp_path / "store"))
    assert (state.is_failed(), state.message) == (True, "it broke")
