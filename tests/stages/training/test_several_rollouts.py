"""An update on two stored rollouts, each made by another policy and scored for itself."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.sampling.solvers import planned_kernel
from cosmos_rl_core.training.noise_levels import random_times
from flows.planning import requests
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.tables import read_table
from stages.training import draws
from tests.stages.conftest import FEW_PROMPTS, make
from tests.stages.training.test_transitions import LORA, iterate, recipe, started

SDE = {"num_steps": 4, "solver": "flow_sde"}


class Killed(BaseException):
    """Ends a stage as SIGKILL would: nothing of it runs any more."""


class KilledAt(Outcome):
    """Kills the stage when it reports one optimizer step."""

    step = 1

    def progress(self, phase: str, step: int, total: int) -> None:
        super().progress(phase, step, total)
        if phase == "training" and step == self.step:
            raise Killed


def values_of(algorithm: str, lora: dict[str, Any] | None) -> dict[str, Any]:
    values = recipe(SDE if algorithm == "grpo" else {"num_steps": 4}, lora)
    if algorithm == "nft":
        policy = {"type": "nft", "mini_batch": 2, "batch_size_per_optimize": 4, "dataset": FEW_PROMPTS}
        values["train"]["train_policy"] = policy | {"timesteps_fraction": 0.5}
    return values


def on_both(run: Run, slot: str) -> Request:
    """The update of iteration 1 on the rollouts of iterations 0 and 1."""
    asked = [requests.update(run, 0), requests.update(run, 1)]
    inputs = {
        role: sum((request.inputs[role] for request in asked), ()) for role in ("rollouts", "behaviours", "scores")
    }
    return asked[1].model_copy(update={"slot": f"{asked[1].slot}-{slot}", "inputs": asked[1].inputs | inputs})


def test_nft_trains_at_the_noise_levels_of_its_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where the solver has a grid of its own."""
    values, grids = values_of("nft", LORA), list[tuple[float, ...]]()
    values["policy"]["diffusers"]["sample"] = {"num_steps": 4, "solver": "edm"}

    def told(sigmas: tuple[float, ...], num_times: int, key: Any) -> list[float]:
        grids.append(sigmas)
        return random_times(sigmas, num_times, key)

    monkeypatch.setattr(draws, "random_times", told)
    iterate(started(tmp_path, values), tmp_path)
    assert {*grids} == {planned_kernel(SolverConfig(num_steps=4, solver="edm")).levels}


def two_iterations(tmp_path: Path, algorithm: str, lora: dict[str, Any] | None = LORA) -> Run:
    run = started(tmp_path, values_of(algorithm, lora))
    for k in (0, 1):
        iterate(run, tmp_path, k)
    return run


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return two_iterations(tmp_path_factory.mktemp("grpo"), "grpo")


def table_of(slot: str, name: str) -> Any:
    return read_table(Artifact(input_of(slot)), name)


def test_each_rollout_is_compared_with_its_own_behaviour_and_has_advantages_of_its_own(grpo: Run, tmp_path: Path):
    request = on_both(grpo, "compared")
    make(request, tmp_path)
    contents = [Artifact(source).manifest.content for source in request.inputs["rollouts"]]

    advantages = table_of(request.slot, contracts.Update.ADVANTAGES)
    assert advantages["rollout"].tolist() == [content for content in contents for _ in range(8)]
    for k in (0, 1):
        alone = table_of(grpo.slots.policy(k + 1), contracts.Update.ADVANTAGES)
        mine = advantages[advantages["rollout"] == contents[k]].reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, alone)

    transitions = table_of(request.slot, contracts.Update.TRANSITIONS)
    assert sorted(transitions.groupby(["rollout", "sample_id", "step"]).size()) == [1] * 32
    first = transitions[transitions["optimizer_step"] == 0]
    assert {content: len(part) for content, part in first.groupby("rollout")}.keys() == {*contents}
    # Before the first step the weights are policy 1's, which made the second rollout and not the first.
    assert first[first["rollout"] == contents[1]]["log_ratio"].eq(0).all()
    assert first[first["rollout"] == contents[0]]["log_ratio"].ne(0).all()
    assert (transitions["logp_drift"] < 1e-5).all()


@pytest.mark.parametrize(("algorithm", "lora"), [("grpo", LORA), pytest.param("nft", None, marks=pytest.mark.slow)])
def test_an_update_on_two_rollouts_that_is_killed_ends_with_the_same_bits(
    algorithm: str, lora: dict[str, Any] | None, request: pytest.FixtureRequest, tmp_path: Path
):
    run = request.getfixturevalue("grpo") if algorithm == "grpo" else two_iterations(tmp_path, algorithm, lora)
    whole, killed = on_both(run, "whole"), on_both(run, "killed")
    make(whole, tmp_path)
    with pytest.raises(Killed):
        execute(killed, Execution(), KilledAt(tmp_path / "outcome", 0))
    make(killed, tmp_path)
    assert input_of(killed.slot).content == input_of(whole.slot).content
    assert input_of(whole.slot).content != input_of(requests.update(run, 1).slot).content


def test_rollouts_that_do_not_belong_together_are_refused(grpo: Run, tmp_path: Path):
    request = on_both(grpo, "refused")

    def ask(**roles: Any) -> None:
        make(request.model_copy(update={"inputs": request.inputs | roles}), tmp_path)

    rollouts, behaviours, scores = (request.inputs[role] for role in ("rollouts", "behaviours", "scores"))
    with pytest.raises(ConfigError, match="a rollout is given twice"):
        ask(rollouts=rollouts[:1] * 2, behaviours=behaviours[:1] * 2)
    with pytest.raises(ConfigError, match="the rollouts were made by policies"):
        ask(behaviours=behaviours[::-1])
    with pytest.raises(ArtifactError, match=r"has scores by no reward, this update trains on jpeg"):
        ask(scores=scores[:1])
