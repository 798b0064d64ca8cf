"""A whole run that trains on pairs: its numbers, its audit, and its update made again."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flows.auditing.audit import audit
from flows.library.opened_run import open_run
from tests.e2e.flow_process import NO_PREFECT, RECIPE, ROOT, RUN_ID, Flows, metrics

DPO = """[train.train_policy]
type = "dpo"
mini_batch = 4
batch_size_per_optimize = 4
timesteps_fraction = 1.0
beta = 100.0
pairs = "all"

"""
SIZES = ("--set", 'rewards=[{ fn = { name = "jpeg" } }]', "--iterations", "2")
"""The reward is the size of a file, which differs for any two samples."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Flows:
    folder = tmp_path_factory.mktemp("dpo")
    text = (ROOT / RECIPE).read_text(encoding="utf-8")
    recipe = re.sub(r"\[train\.train_policy\]\n.*?\n\n", lambda _: DPO, text, flags=re.DOTALL)
    path: Path = folder / "dpo.toml"
    path.write_text(recipe, encoding="utf-8")
    flows = Flows(folder, {}, str(path))
    flows.program = NO_PREFECT
    flows.run(*SIZES)
    return flows


def test_metrics_say_how_many_pairs_trained_and_how_they_fared(trained: Flows) -> None:
    lines: list[dict[str, Any]] = metrics(trained)
    pairs = [line["train/pairs"] for line in lines if "train/pairs" in line]
    dropped = [line["train/pairs_dropped"] for line in lines if "train/pairs" in line]
    assert [sum(both) for both in zip(pairs, dropped, strict=True)] == [12, 12]
    assert min(pairs) > 6
    steps = [line for line in lines if "train/accuracy" in line]
    assert len(steps) == 4
    assert (steps[0]["train/margin"], steps[0]["train/accuracy"]) == (0, 0)
    assert all(line["train/margin"] != 0 for line in steps[1:])
    named = {"train/winner_error_change", "train/loser_error_change", "train/loss_avg"}
    assert all(named <= line.keys() for line in steps)


def test_the_library_shows_which_samples_each_one_beats(trained: Flows) -> None:
    table: pd.DataFrame = open_run(RUN_ID, store=trained.store).samples(1)
    reward = dict(zip(table["sample_id"], table["reward"], strict=True))
    for winner, losers in zip(table["sample_id"], table["beats"], strict=True):
        assert all(reward[winner] > reward[loser] for loser in losers.split())
    assert sum(len(losers.split()) for losers in table["beats"]) > 6


def test_its_audit_is_clean_and_an_update_is_made_again_bit_for_bit(trained: Flows) -> None:
    assert audit(trained.store, RUN_ID).faults == []
    # The second goes on from where the first one ended.
    said = trained.command("replay", "--stage", "update", "--iteration", "1")
    assert "iteration-0001/update: equal bit for bit" in said
