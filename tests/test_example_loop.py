"""The example that shows an iteration as one loop takes the steps of the stages."""

import runpy
from pathlib import Path

import pytest

from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.policies import read_part
from stages.formats.tables import read_table
from tests.hand_made import rewards
from tests.stages.conftest import FEW_PROMPTS, make

SCRIPT, RECIPE = Path(__file__).parents[1] / "docs" / "examples" / "nft_loop.py", "configs/tiny/nft.toml"
ITERATIONS = 2
OVERRIDES = [
    f"train.train_policy.dataset={{ name = 'ocr', local_dir = '{FEW_PROMPTS['local_dir']}' }}",
    "train.train_batch_per_replica=12",
    "train.optm_warmup_steps=3",
    "train.train_policy.batch_size_per_optimize=6",
    "train.train_policy.mini_batch=3",
    "rollout.n_generation=6",
    "rollout.n_generation_mini_batch=4",
]
"""Two of four prompts an iteration, six samples each, two optimizer steps of two micro-batches."""


def test_the_loop_that_shows_an_iteration_takes_the_steps_of_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(SCRIPT.parents[2])
    monkeypatch.setattr("sys.argv", [str(SCRIPT), RECIPE, str(ITERATIONS), *OVERRIDES])
    told = runpy.run_path(str(SCRIPT))
    store = str(tmp_path / "store")
    run = Run(freeze(plan_of(Settings(RECIPE, store, "ours", overrides=OVERRIDES)), store), store)
    make(requests.policy(run), tmp_path)
    make(run.prepared.embed, tmp_path)
    for k in range(ITERATIONS):
        make(requests.rollout(run, k), tmp_path)
        (scored,) = rewards(run, run.slots.iteration(k, "rollout"), k)
        make(scored, tmp_path)
        make(requests.update(run, k), tmp_path)
        scores = read_table(Artifact(input_of(scored.slot)), "scores.parquet")
        steps = read_table(Artifact(input_of(run.slots.iteration(k, "update"))), METRICS)
        assert told["history"][k]["reward"] == pytest.approx(scores["score"].mean(), abs=1e-6)
        assert told["history"][k]["loss"] == pytest.approx(steps["loss"].mean(), rel=1e-4)
    start = read_part(input_of(run.slots.policy(0)), "current")
    for part in ("current", "old"):
        ours, theirs = read_part(input_of(run.slots.policy(ITERATIONS)), part), told["weights"].here(part)
        off, moved = (
            sum(float((tensor - others[name]).abs().sum()) for name, tensor in ours.items())
            for others in (theirs, start)
        )
        assert off < 1e-3 * moved, (off, moved)


def test_the_loop_refuses_settings_that_it_does_not_read(monkeypatch: pytest.MonkeyPatch):
    changes = ["train.optm_name=Adam", "rollout.decode_share=0.5", "train.train_policy.kl_beta=0.1"]
    monkeypatch.chdir(SCRIPT.parents[2])
    monkeypatch.setattr("sys.argv", [str(SCRIPT), RECIPE, *changes])
    said = "train.optm_name = Adam, rollout.decode_share = 0.5, several rewards, guidance or a KL; run cosmos-flows"
    with pytest.raises(SystemExit, match=said):
        runpy.run_path(str(SCRIPT))
