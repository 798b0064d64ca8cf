"""Replays of stages that read the pictures which prompts refer to."""

from pathlib import Path

import pytest

from flows.auditing.replay import replay
from flows.planning.run import Run
from tests.stages.training.test_reference_runs import rewarded


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run until its rewards."""
    return rewarded(tmp_path_factory.mktemp("replayed"))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stage", "iteration"), [("embed", None), ("references", None), ("reward-pixel_similarity", 0)]
)
def test_a_replay_finds_the_pictures_and_leaves_them_alone(run: Run, stage: str, iteration: int | None):
    pictures = Path(run.store_url, "dataset", "references")
    before = {path: path.stat().st_mtime_ns for path in pictures.iterdir()}
    found = replay(run.store_url, run.plan.run_id, stage, iteration)
    assert (found.found, found.equal) == ([], True)
    assert {path: path.stat().st_mtime_ns for path in pictures.iterdir()} == before
