"""Transitions that an update was trained on: the means of their drift agree with its optimizer steps."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.algorithms._needs import DRIFT_METRICS
from cosmos_rl_core.estimates.sample_size import effective_sample_size
from flows.auditing.audit import audit
from stages import contracts
from stages.formats.tables import to_parquet
from tests.flows.proved import RUN_ID, Forger, Proved, body_of, told

UPDATE, TRANSITIONS = "iterations/0001/update", contracts.Update.TRANSITIONS
FIRST_STEP = 2
"""Optimizer step with which iteration 1 begins."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose update of iteration 1 has transitions as policy gradients leave them."""
    proved = Proved(tmp_path_factory.mktemp("proved"))
    proved.run()
    forger = Forger(proved.store)
    used = pd.read_parquet(forger.file(UPDATE, contracts.Update.ADVANTAGES)).query("used")
    rng, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for place, (rollout, sample_id) in enumerate(zip(used["rollout"], used["sample_id"], strict=True)):
        for step in range(3):
            named = {"optimizer_step": place % 2, "rollout": rollout, "sample_id": sample_id, "step": step}
            rows.append(named | {name: float(np.float32(rng.normal(0, 0.01))) for name in DRIFT_METRICS})
    table: Any = pd.DataFrame(rows).sort_values("optimizer_step", ignore_index=True)
    slot = forger.root / UPDATE
    path = f"attempts/{body_of(slot / 'manifest.1.json')['attempt']}/{TRANSITIONS}"
    (slot / path).write_bytes(to_parquet(table))
    forger.manifest(UPDATE, lambda body: body["files"].update({TRANSITIONS: {"path": path, "size": 0, "sha256": ""}}))

    def with_means(steps: pd.DataFrame) -> pd.DataFrame:
        of_steps = [table[table["optimizer_step"] == step - FIRST_STEP] for step in steps["step"]]
        means = {name: [float(some[name].sum()) / len(some) for some in of_steps] for name in DRIFT_METRICS}
        sizes = [effective_sample_size(some["log_ratio"]) for some in of_steps]
        return steps.assign(**means, effective_sample_size=sizes)

    forger.table(UPDATE, contracts.METRICS, with_means)
    forger.seal()
    assert audit(str(proved.store), RUN_ID).faults == []
    return proved.store


@pytest.fixture
def forger(finished: Path, tmp_path: Path) -> Forger:
    return Forger(shutil.copytree(finished, tmp_path / "store"))


def changed(column: str, value: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def change(table: pd.DataFrame) -> pd.DataFrame:
        table.loc[0, column] = value
        return table

    return change


def test_a_changed_drift_contradicts_the_mean_of_its_optimizer_step(forger: Forger):
    forger.table(UPDATE, TRANSITIONS, changed("ratio", 0.5))
    forger.seal()
    assert len(told(forger)) == 1
    for column in DRIFT_METRICS:
        forger.table(UPDATE, TRANSITIONS, changed(column, 0.5))
    forger.seal()
    found = told(forger)
    for column in DRIFT_METRICS:
        assert any(f"{TRANSITIONS} {column}, optimizer step {FIRST_STEP}: a mean of " in line for line in found)
    # And the effective sample size, of the log-ratios.
    assert len(found) == len(DRIFT_METRICS) + 1


def test_the_effective_sample_size_follows_from_the_log_ratios(forger: Forger):
    forger.table(UPDATE, contracts.METRICS, changed("effective_sample_size", 0.5))
    forger.seal()
    (line,) = told(forger)
    assert f"effective_sample_size, optimizer step {FIRST_STEP}: " in line
    assert line.endswith(f"{contracts.METRICS} says 0.5")


def test_transitions_belong_to_samples_and_optimizer_steps_that_trained(forger: Forger):
    forger.table(UPDATE, TRANSITIONS, changed("sample_id", "i0001-other-000"))
    forger.seal()
    (line,) = told(forger)
    assert line.endswith("samples: i0001-other-000 was not trained on")
    forger.table(UPDATE, TRANSITIONS, lambda table: table.query("optimizer_step == 1"))
    forger.seal()
    assert any("optimizer steps: [3], " in line and line.endswith("says [2, 3]") for line in told(forger))
