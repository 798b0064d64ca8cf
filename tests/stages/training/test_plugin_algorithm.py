"""An algorithm from outside whose recorded steps move from iteration to iteration."""

from pathlib import Path

import pytest

from cosmos_rl_core.errors import ConfigError
from cosmos_rl_core.outside_plugins import find
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.sizes import costs
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import current_manifest, input_of
from stages.contracts import METRICS
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.stages.conftest import make
from tests.stages.small_grpo import settings_with

WINDOW = """
from dataclasses import replace
from typing import Literal

from cosmos_rl_core.algorithms.grpo import Algorithm as Grpo
from cosmos_rl_core.algorithms.grpo import Options as GrpoOptions


class Options(GrpoOptions):
    type: Literal["window"]


class Algorithm(Grpo):
    @property
    def needs(self):
        return replace(self._all, steps_of=lambda k: STEPS)

    @needs.setter
    def needs(self, value):
        self._all = value
"""


@pytest.fixture
def forget():
    yield
    find([])


def settings(folder: Path, steps: str) -> Settings:
    file = folder / "window.py"
    file.write_text(WINDOW.replace("STEPS", steps), encoding="utf-8")
    return settings_with(file, "train.train_policy.type=window")


@pytest.mark.usefixtures("forget")
def test_each_iteration_records_and_trains_on_the_steps_planned_for_it(tmp_path: Path):
    store = str(tmp_path / "store")
    run = Run(freeze(plan_of(settings(tmp_path, "(k, k + 1)")), store), store)
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    for k in range(2):
        rollout = requests.rollout(run, k)
        make(rollout, tmp_path)
        made = current_manifest(rollout)
        assert made is not None
        assert made.config["train_on"] == [k, k + 1]
        make(rewards(run, run.slots.iteration(k, "rollout"), k)[0], tmp_path)
        make(requests.update(run, k), tmp_path)
        update = Artifact(input_of(run.slots.iteration(k, "update")))
        assert {*read_table(update, "transitions.parquet")["step"]} == {k, k + 1}
        assert float(read_table(update, METRICS)["logp_drift"].to_numpy().max()) < 1e-5


@pytest.mark.usefixtures("forget")
def test_planned_bytes_are_of_the_iteration_that_stores_most(tmp_path: Path):
    shapes = "(0, 1)", "(0, 2) if k else (0, 1)"
    close, apart = (costs.sample_bytes(plan_of(settings(tmp_path, steps)).recipe) for steps in shapes)
    # Two steps in a row share a state: final latents and three states, or four.
    assert close * 5 == apart * 4


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize(
    ("steps", "said"),
    [("(0,)", "steps_of returned (0,); expected 2 steps, as in train_on"), ("(k, 7)", "train_on = [0, 7]")],
)
def test_steps_that_no_rollout_has_are_refused_by_the_plan(steps: str, said: str, tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        plan_of(settings(tmp_path, steps))
    assert said in str(caught.value)
