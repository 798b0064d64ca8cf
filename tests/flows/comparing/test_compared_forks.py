"""A fork and its origin side by side."""

from pathlib import Path
from typing import Any

import pytest

from flows.comparing.artifacts import DERIVED, artifacts
from flows.comparing.side import Side
from flows.library import open_run
from flows.planning.run import Run
from flows.post_train import steps
from tests.flows.by_hand import make_all, planned_run
from tests.flows.forking.forked import begun
from tests.flows.forking.test_fork_plans import FASTER


@pytest.fixture
def origin(recipe: Any, tmp_path: Path) -> Run:
    """A finished run of two iterations with held-out samples of policies 0 and 2."""
    run = planned_run(recipe, tmp_path)
    make_all(run)
    return run


def test_a_comparison_counts_referenced_artifacts_of_a_fork(origin: Run) -> None:
    url = origin.store_url
    for changes in ((), FASTER):
        fork = begun(origin, 1, overrides=changes)
        make_all(fork)
        sides = (Side(open_run(run.plan.run_id, url)) for run in (origin, fork))
        found = artifacts(*sides)
        assert found.equal is (changes == ())
        assert not any(one.only_a or one.only_b for one in found.stages)
    assert found.first == "iteration-0001/update"
    # What is before the fork, its rollout and the scores of that.
    assert found.before == len([step for step in steps(origin) if step.kind not in DERIVED and (step.k or 0) < 1]) + 3
