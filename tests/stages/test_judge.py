"""An iteration of NFT whose reward is a scorer with torch, in a stage of its own: on ranks, killed, and trained on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.rewards._base import Sample
from flows.planning import requests
from flows.planning.run import Run
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.execution.execution import Execution
from stages.execution.outcome import Outcome
from stages.execution.runner import execute
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from tests import tiny_scorers
from tests.hand_made import rewards
from tests.stages.artifacts.test_damaged_work import Dying, Killed
from tests.stages.conftest import FEW_PROMPTS, make, make_run
from tests.stages.every_stage import recipe

NFT = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": FEW_PROMPTS}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with its first rollout: eight samples in two units of four."""
    folder = tmp_path_factory.mktemp("judged")
    values = recipe(NFT, lora={"r": 2, "target_modules": ["to_q"]})
    scorer: dict[str, Any] = {"name": "clip_score", **tiny_scorers.settings("clip_score", folder / "clip")}
    values |= {"rewards": [{"fn": scorer}]}
    del values["validation"]
    run = make_run(folder / "store", values, "judged")
    for request in (partial(requests.policy, run), lambda: run.prepared.embed, partial(requests.rollout, run, 0)):
        make(request(), folder)
    return run


def judging(run: Run, slot: str | None = None) -> Request:
    (request,) = rewards(run, run.slots.iteration(0, "rollout"), 0)
    return request if slot is None else request.model_copy(update={"slot": slot})


@pytest.fixture(scope="module")
def judged(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return make(judging(run), tmp_path_factory.mktemp("outcome"))


def test_a_reward_with_torch_is_judged_on_ranks_and_trained_on_like_any_other(
    run: Run, judged: Manifest, tmp_path: Path
):
    assert (judged.stage, judged.summary["scored"]) == ("judge", 8)
    assert judging(run).slot == run.slots.iteration(0, "reward-clip_score")
    assert judged.numerics["compute_dtype"] == "float32"
    options = run.recipe.rewards[0].fn
    samples = [
        Sample(stored.sample_id, stored.row["prompt_id"], stored.row["prompt"], stored.pixels)
        for stored in read_samples(Artifact(input_of(run.slots.iteration(0, "rollout"))))
    ]
    own = plugins.load("rewards", "clip_score").Reward(options).score(samples)
    table = read_table(Artifact(input_of(judging(run).slot)), contracts.Judge.SCORES)
    scores: dict[str, float] = dict(zip(table["sample_id"], table["score"], strict=True))
    assert scores == {s.sample_id: entry["clip_score"] for s, entry in zip(samples, own, strict=True)}
    assert len({*scores.values()}) > 4
    update = make(requests.update(run, 0), tmp_path)
    advantages = read_table(Artifact(input_of(run.slots.policy(1))), contracts.Update.ADVANTAGES)
    assert [*advantages["used"]] == [True] * 8
    assert dict(zip(advantages["sample_id"], advantages["reward"], strict=True)) == scores
    assert update.stage == "update"


def test_a_killed_judge_goes_on_with_its_finished_units(run: Run, judged: Manifest, tmp_path: Path):
    request = judging(run, str(tmp_path / "killed"))
    with pytest.raises(Killed):
        execute(request, Execution(), Dying(tmp_path / "outcome", ("scoring", 1)))
    again = execute(request, Execution(), Outcome(tmp_path / "outcome", 0))
    assert again.content == judged.content
    # The first unit was scored by the attempt that died.
    assert len(read_table(Artifact(input_of(request.slot)), contracts.Judge.CALLS)) == 1
