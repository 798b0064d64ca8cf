"""The plugins of the pages, written to a folder as a reader would and run stage by stage."""

from functools import partial
from pathlib import Path

import pytest

from cosmos_rl_core.outside_plugins import find
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import METRICS, Reward, Update
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.pages import write_examples
from tests.stages.conftest import make


@pytest.fixture
def run(tmp_path: Path):
    """A run of the recipe of the pages; this process forgets its plugins afterwards."""
    write_examples(tmp_path)
    store = str(tmp_path / "store")
    yield Run(freeze(plan_of(Settings(str(tmp_path / "my_recipe.toml"), store, run_id="pages")), store), store)
    find([])


def test_reward_dataset_and_algorithm_of_the_pages_train(run: Run, tmp_path: Path):
    for request in (partial(requests.policy, run), lambda: run.prepared.embed, partial(requests.rollout, run, 0)):
        make(request(), tmp_path)
    (reward,) = rewards(run, run.slots.iteration(0, "rollout"), 0)
    make(reward, tmp_path)
    make(requests.update(run, 0), tmp_path)
    scores = read_table(Artifact(input_of(reward.slot)), Reward.SCORES)
    assert len(scores) == 8
    assert scores["score"].between(-1, 1).all()
    update = Artifact(input_of(run.slots.iteration(0, "update")))
    advantages = read_table(update, Update.ADVANTAGES)
    for _, group in advantages.groupby("prompt_id"):
        assert group["advantage"].to_numpy().sum() == pytest.approx(0, abs=1e-6)
    assert (read_table(update, METRICS)["weight"].to_numpy() > 0).all()
