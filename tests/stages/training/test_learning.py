"""DiffusionNFT learns from rewards, and from nothing else.

The shipped recipe, cut short; the same with shuffled scores, and with a reward that can be hacked.
"""

from pathlib import Path

import numpy as np
import pytest

from cosmos_rl_core.errors import WarningError
from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from flows.warning.decisions import decisions_on
from flows.warning.gate import pass_gate
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.slots import current_of, input_of
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.stages.conftest import make

ITERATIONS = 8
HACKED_BY = 12
"""Iterations within which JPEG files as a reward leave nothing of the pictures."""
SHUFFLED = "train.train_policy.shuffle_rewards=true"
RECIPE = str(Path(__file__).parents[3] / "configs" / "tiny" / "nft.toml")


def start(tmp_path: Path, name: str, *changes: str) -> Run:
    plan = plan_of(Settings(RECIPE, run_id=name, overrides=("validation.n_generation=8", *changes)))
    run = Run(freeze(plan, str(tmp_path)), str(tmp_path))
    for request in (requests.policy(run), run.prepared.embed):
        make(request, tmp_path)
    return run


def train(run: Run, tmp_path: Path, iterations: int = ITERATIONS) -> None:
    for k in range(iterations):
        make(requests.rollout(run, k), tmp_path)
        (reward,) = rewards(run, run.slots.iteration(k, "rollout"), k)
        make(reward, tmp_path)
        make(requests.update(run, k), tmp_path)


def require_permuted(run: Run) -> None:
    """The scores that were trained on are the rollout's, each on another sample."""
    scores = read_table(Artifact(input_of(run.slots.iteration(0, "reward-ocr"))), contracts.Reward.SCORES).sort_values(
        "sample_id"
    )
    used = read_table(Artifact(input_of(run.slots.iteration(0, "update"))), contracts.Update.ADVANTAGES).sort_values(
        "sample_id"
    )
    given, trained = scores["score"].to_numpy("float64"), used["reward"].to_numpy("float64")
    assert np.allclose(np.sort(given), np.sort(trained))
    assert np.mean(given != trained) > 0.2


def held_out(run: Run, tmp_path: Path, k: int) -> float:
    """Mean OCR score of 320 held-out images by the stock pipeline from the exported weights."""
    make(requests.export(run, k), tmp_path)
    samples = requests.evaluate(run, k)
    make(samples, tmp_path)
    summary = make(rewards(run, samples.slot, k)[0], tmp_path).summary
    assert summary["scored"] == 320
    return float(summary["ocr"] or 0)


def rise_of(run: Run, tmp_path: Path) -> float:
    """What training adds to the held-out reward; a difference of two evaluations by the same 320 seeds."""
    base = held_out(run, tmp_path, 0)
    train(run, tmp_path)
    return held_out(run, tmp_path, ITERATIONS) - base


@pytest.mark.slow
def test_shuffled_scores_are_a_permutation_of_the_rollouts_scores(tmp_path: Path):
    run = start(tmp_path, "control", SHUFFLED, "rollout.n_generation=4", "train.train_batch_per_replica=32")
    train(run, tmp_path, iterations=1)
    require_permuted(run)


@pytest.mark.slow
def test_the_held_out_reward_rises_with_true_scores_and_not_with_shuffled_ones(tmp_path: Path):
    true, control = start(tmp_path, "true"), start(tmp_path, "control", SHUFFLED)
    rise, drift = rise_of(true, tmp_path), rise_of(control, tmp_path)
    require_permuted(control)
    # Three standard errors of a paired difference on 320 images.
    assert rise > 3 * 0.015
    assert drift < 0.05
    assert rise - drift > 0.06


def trains_until(run: Run, tmp_path: Path, iterations: int) -> int:
    """The iteration that the statistics of its pictures stop, after so many at most."""
    for k in range(iterations):
        make(requests.rollout(run, k), tmp_path)
        samples = run.slots.iteration(k, "rollout")
        for reward in run.scored:
            make(requests.reward(run, reward, samples, k), tmp_path)
        try:
            pass_gate(run, [make(requests.warn(run, k), tmp_path)], print)
        except WarningError:
            return k
        make(requests.update(run, k), tmp_path)
    return iterations


@pytest.mark.slow
def test_a_run_that_hacks_its_reward_is_stopped_by_statistics_and_an_honest_one_is_not(tmp_path: Path):
    stops = "early_warning.on_trip=stop"
    hacked = start(tmp_path, "hacked", stops, "rewards=[{ fn = { name = 'jpeg' } }]")
    stopped = trains_until(hacked, tmp_path, HACKED_BY)
    assert 0 < stopped < HACKED_BY
    # Files get small because pictures get bright and lose contrast, long before the reward itself is conspicuous.
    tripped = decisions_on(warning_of(hacked, stopped))[0].tripped[0]
    assert tripped.startswith(("luma of pixel_statistics rose", "contrast of pixel_statistics fell"))
    assert trains_until(start(tmp_path, "honest", stops), tmp_path, stopped + 1) == stopped + 1


def warning_of(run: Run, k: int) -> Manifest:
    _, manifest = current_of(run.slots.iteration(k, "warn"))
    assert manifest is not None
    return manifest
