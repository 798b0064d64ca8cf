"""A whole run with two rewards of unlike scale, a gate and a monitor: what it stores is what the closed forms say."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core import plugins
from cosmos_rl_core.rewards._base import Sample
from flows.auditing.audit import audit
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.slots import input_of
from stages.formats.samples import read_unit
from stages.formats.tables import read_table
from tests.e2e.flow_process import NO_PREFECT, RUN_ID, Flows, metrics

PROBE = "tests/core/reward_service/probe.py"
WEIGHTS = {"ocr": 1.0, "probe": 0.1}
"""Scores in [0, 1], and means of pixels up to 255: in a plain sum the second drowns the first, even so."""
FLOOR = 1e-4


def table(flows: Flows, k: int, stage: str, name: str) -> pd.DataFrame:
    """A stored table of a stage of an iteration, by sample."""
    artifact = Artifact(input_of(flows.planned.slots.iteration(k, stage)))
    return read_table(artifact, name).set_index("sample_id")


def scores(flows: Flows, k: int, reward: str) -> np.ndarray:
    """The stored scores of an iteration."""
    return table(flows, k, f"reward-{reward}", contracts.Reward.SCORES)["score"].to_numpy(np.float64)


def recipe(bound: float, most: float, iterations: int, on_fail: str = "exclude") -> list[str]:
    """Changes of the recipe: its rewards, and how they are mixed. The statistics of pixels are the monitor."""
    gate = f"min = {bound!r}, on_fail = '{on_fail}', max_gated_fraction = {most}"
    rewards = [
        "{ fn = { name = 'ocr', line_width = 96 } }",
        f"{{ weight = {WEIGHTS['probe']}, fn = {{ name = 'probe' }} }}",
        f"{{ role = 'gate', fn = {{ name = 'jpeg' }}, {gate} }}",
    ]
    changes = {
        "plugins": f"['{PROBE}']",
        "rewards": f"[{', '.join(rewards)}]",
        "train.train_policy.mixing": "gdpo",
        "train.train_policy.global_std": "false",
        "early_warning.statistics": "true",
    }
    options = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return [*options, "--iterations", str(iterations)]


def bound_below(flows: Flows, gated: int) -> float:
    """A bound on ``jpeg`` that so many samples of iteration 0 do not reach, halfway between two."""
    rollout, jpeg = Artifact(input_of(flows.planned.slots.iteration(0, "rollout"))), plugins.load("rewards", "jpeg")
    units = range(len([*rollout.names(contracts.MEDIA)]))
    stored = [one for unit in units for one in read_unit(rollout, unit)]
    samples = [Sample(one.sample_id, "", "", one.pixels) for one in stored]
    found = sorted(entry["jpeg"] for entry in jpeg.Reward(jpeg.Options()).score(samples))
    return float(np.mean(found[gated - 1 : gated + 1]))


def mixed(
    raw: dict[str, np.ndarray], kept: np.ndarray, prompts: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Each reward normalised within its prompts and weighted, and the advantages, of the samples that are kept."""
    parts: dict[str, np.ndarray] = {}
    for reward, weight in WEIGHTS.items():
        found = raw[reward]
        parts[reward] = np.full(len(found), np.nan)
        for prompt in set(prompts):
            group = kept & (prompts == prompt)
            parts[reward][group] = weight * (found[group] - found[group].mean()) / (found[group].std() + FLOOR)
    total = sum(parts.values(), np.zeros(len(kept)))
    return parts, total / (total[kept].std() + FLOOR)


def second_run(reference: Flows, folder: Path) -> Flows:
    """A store with the embeddings of the reference, which runs share."""
    flows = Flows(folder, {})
    flows.program = NO_PREFECT
    shutil.copytree(Path(reference.store) / "dataset", Path(flows.store) / "dataset")
    return flows


@pytest.fixture(scope="module")
def gated(reference: Flows, tmp_path_factory: pytest.TempPathFactory) -> tuple[Flows, float]:
    """A run whose gate holds back two samples, and its bound."""
    flows, bound = second_run(reference, tmp_path_factory.mktemp("gated")), bound_below(reference, 2)
    flows.run(*recipe(bound, 0.9, 1))
    return flows, bound


def test_what_trains_is_what_the_closed_forms_make_of_the_stored_scores(gated: tuple[Flows, float]) -> None:
    flows, bound = gated
    found = table(flows, 0, "update", contracts.Update.ADVANTAGES)
    kept, prompts = scores(flows, 0, "jpeg") >= bound, found["prompt_id"].to_numpy()
    raw = {reward: scores(flows, 0, reward) for reward in WEIGHTS}
    parts, advantages = mixed(raw, kept, prompts)
    assert [*found["used"]] == [*kept]
    assert [bool(why) for why in found["gated"]] == [*~kept]
    np.testing.assert_allclose(found["advantage"], advantages, rtol=1e-9, atol=1e-12)
    for reward, part in parts.items():
        np.testing.assert_allclose(found[f"reward.{reward}"][kept], part[kept], rtol=1e-9, atol=1e-12)
        assert np.nanmax(np.abs(part)) <= WEIGHTS[reward] * np.sqrt(3)
    # The scores themselves spread the other way.
    assert np.ptp(raw["probe"]) > 3 * np.ptp(raw["ocr"])


def test_gated_samples_are_in_no_optimizer_step(gated: tuple[Flows, float]) -> None:
    flows, bound = gated
    (layout,) = (flows.root / "iterations/0000/update").rglob("layout*.json")
    steps = json.loads(layout.read_bytes())["body"]["layout"]["steps"]
    drawn = sorted(key.partition("/")[2] for step in steps for batch in step for key in batch)
    found = table(flows, 0, "update", contracts.Update.ADVANTAGES)
    assert drawn == sorted(found.index[scores(flows, 0, "jpeg") >= bound])
    assert len(drawn) == 6


def test_audit_metrics_and_report_of_the_run_show_gate_and_monitor(gated: tuple[Flows, float]) -> None:
    flows, _ = gated
    assert audit(flows.store, RUN_ID).faults == []
    report = (next((flows.root / "report").rglob("index.html"))).read_text(encoding="utf-8")
    names = ("ocr", "probe", "jpeg", "pixel_statistics")
    assert [name for name in names if name not in report] == []
    for name in names:
        (mean,) = [line[f"reward/{name}_mean"] for line in metrics(flows) if f"reward/{name}_mean" in line]
        assert mean == pytest.approx(scores(flows, 0, name).mean())


@pytest.mark.slow
def test_gated_samples_with_the_worst_rewards_of_their_prompt_train(reference: Flows, tmp_path: Path) -> None:
    flows, bound = second_run(reference, tmp_path), bound_below(reference, 2)
    said = flows.run(*recipe(bound, 0.2, 2, "worst"), expect=65)
    assert "the gate jpeg holds back 2 of 8 samples, more than max_gated_fraction = 0.2" in said
    assert "another attempt follows" not in said
    assert not list((flows.root / "iterations/0000/update").glob("manifest.*.json"))
    flows.run(*recipe(bound, 0.9, 2, "worst"))
    for k in range(2):
        found = table(flows, k, "update", contracts.Update.ADVANTAGES)
        passed, prompts = scores(flows, k, "jpeg") >= bound, found["prompt_id"].to_numpy()
        raw = {reward: scores(flows, k, reward) for reward in WEIGHTS}
        total = sum((weight * raw[reward] for reward, weight in WEIGHTS.items()), np.zeros(len(found)))
        worst = [np.argmin(np.where(prompts == prompt, total, np.inf)) for prompt in prompts]
        source = np.where(passed, np.arange(len(found)), worst)
        _, advantages = mixed({r: raw[r][source] for r in raw}, np.ones(len(found), bool), prompts)
        assert all(found["used"])
        np.testing.assert_allclose(found["advantage"], advantages, rtol=1e-9, atol=1e-12)
    assert audit(flows.store, RUN_ID).faults == []
