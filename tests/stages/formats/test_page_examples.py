"""The plugins of the pages, written to a folder as a reader would and run stage by stage."""

from functools import partial
from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.outside_plugins import find
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import METRICS, Reward, Update
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.pages import write_examples
from tests.stages.conftest import make


@pytest.fixture
def folder(tmp_path: Path):
    """The files of the pages; this process forgets their plugins afterwards."""
    write_examples(tmp_path)
    yield tmp_path
    find([])


def made_to_update(folder: Path) -> tuple[Run, Request]:
    """Make everything before the first update of the recipe of the pages. Returns the run and its reward."""
    store = str(folder / "store")
    run = Run(freeze(plan_of(Settings(str(folder / "my_recipe.toml"), store, run_id="pages")), store), store)
    for request in (partial(requests.policy, run), lambda: run.prepared.embed, partial(requests.rollout, run, 0)):
        make(request(), folder)
    (reward,) = rewards(run, run.slots.iteration(0, "rollout"), 0)
    make(reward, folder)
    return run, reward


def test_an_advantage_that_is_not_finite_names_the_algorithm(folder: Path):
    text = (folder / "rwr.py").read_text(encoding="utf-8")
    (folder / "rwr.py").write_text(text.replace("advantage=advantages", 'advantage=float("inf")'), encoding="utf-8")
    run, _ = made_to_update(folder)
    with pytest.raises(ConfigError, match="algorithm 'rwr' uses samples whose advantage is not finite"):
        make(requests.update(run, 0), folder)


def test_reward_dataset_and_algorithm_of_the_pages_train(folder: Path):
    run, reward = made_to_update(folder)
    make(requests.update(run, 0), folder)
    scores = read_table(Artifact(input_of(reward.slot)), Reward.SCORES)
    assert len(scores) == 8
    assert scores["score"].between(-1, 1).all()
    update = Artifact(input_of(run.slots.iteration(0, "update")))
    advantages = read_table(update, Update.ADVANTAGES)
    for _, group in advantages.groupby("prompt_id"):
        assert group["advantage"].to_numpy().sum() == pytest.approx(0, abs=1e-6)
    assert (read_table(update, METRICS)["weight"].to_numpy() > 0).all()
