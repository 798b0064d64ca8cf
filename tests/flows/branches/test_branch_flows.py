"""Forks, re-scores and studies as flows: what is refused before anything starts."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.flows.by_hand import planned_run, validated

forks, rescores, studies = (import_module(f"flows.branches.{name}") for name in ("fork", "rescore", "study"))


def test_a_fork_of_a_policy_that_was_not_made_fails(recipe: Any, tmp_path: Path):
    run = planned_run(recipe, tmp_path)
    state = forks.fork.fn("hand", 1, run.store_url, "mine")
    assert state.is_failed()
    assert "run hand has no policy version yet; begin the fork once it has one" in state.message


def test_a_re_score_of_missing_samples_fails_and_names_the_existing_ones(recipe: Any, tmp_path: Path):
    run = planned_run(recipe, tmp_path)
    state = rescores.rescore.fn("hand", "jpeg", run.store_url)
    assert state.is_failed()
    assert "hand has no rollout" in state.message


@pytest.mark.parametrize("seeds", ["0-", "1-0"])
def test_a_study_of_wrong_seeds_fails(recipe: Any, tmp_path: Path, seeds: str):
    state = studies.study.fn(validated(recipe, tmp_path), seeds, str(tmp_path / "store"))
    assert state.is_failed()
    assert seeds in state.message
    assert not (tmp_path / "store").exists()


def test_any_selection_of_the_iterations_of_a_long_run_is_a_parameter():
    every_other = ",".join(map(str, range(0, 600, 2)))
    parameters = {"run": "hand", "reward": "jpeg", "iterations": every_other}
    assert rescores.rescore.validate_parameters(parameters)["iterations"] == every_other
    assert studies.what_if.validate_parameters({"run": "hand", "iterations": every_other})["iterations"] == every_other
