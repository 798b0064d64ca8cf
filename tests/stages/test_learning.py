"""DiffusionNFT learns from rewards, and from nothing else.

The shipped recipe, cut short, and the same with shuffled scores.
"""

from pathlib import Path

import pandas as pd

from cosmos_rl_core import seeds
from flows.plan import Settings, freeze, plan_of
from flows.requests import Run
from stages.artifacts import Artifact, Attempt, input_of
from stages.contracts import Request
from stages.reward import SCORES
from stages.samples import read_table, to_parquet
from tests.stages.conftest import make

ITERATIONS = 8
RECIPE = str(Path(__file__).parents[2] / "configs" / "tiny" / "nft.toml")


def start(tmp_path: Path, name: str) -> Run:
    plan = plan_of(Settings(RECIPE, run_id=name, overrides=("validation.n_generation=8",)))
    run = Run(freeze(plan, str(tmp_path)), str(tmp_path))
    for request in (run.policy(), run.embed()):
        make(request, tmp_path)
    return run


def train(run: Run, tmp_path: Path, *, shuffled: bool) -> None:
    for k in range(ITERATIONS):
        make(run.rollout(k), tmp_path)
        (reward,) = run.rewards(run.iteration(k, "rollout"), k)
        make(reward, tmp_path)
        update = run.update(k)
        if shuffled:
            update = update.model_copy(update={"inputs": update.inputs | {"scores": (shuffle(reward, k),)}})
        make(update, tmp_path)


def shuffle(reward: Request, k: int):
    """The same scores, each on another sample, as an artifact of its own."""
    artifact = Artifact(input_of(reward.slot))
    scores = read_table(artifact, SCORES)
    order = seeds.permutation(len(scores), "shuffled scores", k)
    scores["score"] = pd.Series(scores["score"].to_numpy()[order])
    request = reward.model_copy(update={"slot": f"{reward.slot}-shuffled"})
    generation, attempt_id, _ = Attempt.begin(request, print)
    attempt = Attempt(request, artifact.manifest.numerics, generation, attempt_id)
    attempt.put(SCORES, to_parquet(scores))
    attempt.commit(attempt.files, {}, print)
    return input_of(request.slot)


def held_out(run: Run, tmp_path: Path, k: int) -> float:
    """Mean OCR score of 320 held-out images by the stock pipeline from the exported weights."""
    make(run.export(k), tmp_path)
    samples = run.evaluate(k)
    make(samples, tmp_path)
    summary = make(run.rewards(samples.slot, k)[0], tmp_path).summary
    assert summary["scored"] == 320
    return float(summary["ocr"] or 0)


def test_the_held_out_reward_rises_with_true_scores_and_not_with_shuffled_ones(tmp_path: Path):
    true, control = start(tmp_path, "true"), start(tmp_path, "control")
    base = held_out(true, tmp_path, 0)
    train(true, tmp_path, shuffled=False)
    train(control, tmp_path, shuffled=True)
    rise = held_out(true, tmp_path, ITERATIONS) - base
    drift = held_out(control, tmp_path, ITERATIONS) - base
    # The standard error of a paired difference on 320 images is about 0.015.
    assert rise > 0.08
    assert drift < 0.05
    assert rise - drift > 0.06
