"""Pages of supervised runs: losses and samples over time, from artifacts with known numbers."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.contracts import METRICS, MediaShape
from stages.formats.losses import item_losses, summary_of
from stages.formats.tables import to_parquet
from stages.reporting.book import Trained
from stages.reporting.training import MAX_POINTS, losses
from tests.stages.made_up import MODEL, TEST, ask, commit, evaluation, fragment, page_of, policy, update_config
from tests.stages.test_report import rows_of, section

LOSSES = {0: [[4.0, 2.0], [1.0, 3.0]], 1: [[2.0, 1.0], [1.0, 0.0]], 2: [[2.0, 1.0], [0.5, 0.5]]}
"""Two items at two noise levels: means of 2.5, 1 and 1, so that versions 1 and 2 are equal."""


def finetuned(root: Path, k: int, losses: list[float]) -> Input:
    """Version k + 1 after as many optimizer steps as losses, in all iterations alike."""
    steps = update_config(0).steps.model_copy(update={"lrs": (1e-3,) * len(losses), "first_step": k * len(losses)})
    config = contracts.Finetune.model_validate(
        {
            "model": MODEL, "lora": None, "gradient_checkpointing": False, "steps": steps, "keeps_ema": False,
            "algorithm": {"type": "sft", "dataset": {"name": "rendered_text"}}, "density": {}, "batch_size": 1,
            "media": MediaShape(size=(4, 8), frames=1),
        }
    )  # fmt: skip
    metrics = pd.DataFrame({"step": range(k * len(losses), (k + 1) * len(losses)), "loss": losses})
    base = policy(root)
    slot = root / f"iterations/{k}/finetune"
    request = ask(slot, config, k, policy=[base], embeddings=[base])
    return commit(slot, request, {METRICS: to_parquet(metrics), "current/0.safetensors": b"%d" % k})


def validated(root: Path, version: int, losses: list[list[float]]) -> Input:
    rows = [
        {"item_id": f"item {i}", "t": (level + 0.5) / len(levels), "loss": loss}
        for i, levels in enumerate(losses)
        for level, loss in enumerate(levels)
    ]
    base, slot = policy(root), root / f"exports/{version}/validate"
    config = contracts.Validate(model=MODEL, lora=None, batch_size=1)
    request = ask(slot, config, version, policy=[base], embeddings=[base], data=[base])
    return commit(slot, request, {contracts.Validate.LOSSES: to_parquet(pd.DataFrame(rows))})


def judged(root: Path, losses: dict[int, list[list[float]]], *, pictures: bool = False) -> list[Input]:
    """Fragments of versions with their losses, and without scores."""
    measured = {version: validated(root, version, found) for version, found in losses.items()}
    made: list[Input] = []
    for version, found in measured.items():
        inputs = {"validations": [found]} | ({"first_validations": [measured[0]]} if version else {})
        if pictures:
            inputs["samples"] = [evaluation(root, version)["samples"]]
        made.append(fragment(root, version, held_out=True, inputs=inputs))
    return made


def supervised_page(root: Path) -> str:
    updates = [finetuned(root, k, [0.5 - k / 4, 0.25]) for k in (0, 1)]
    return page_of(root, {"updates": updates, "judged": judged(root, LOSSES, pictures=True)}, reward="")


def test_both_losses_are_drawn_by_optimizer_steps_with_errors_over_items(tmp_path: Path):
    page = supervised_page(tmp_path)
    assert rows_of(page, "loss") == [("0", "0.5", "1"), ("1", "0.25", "1"), ("2", "0.25", "1"), ("3", "0.25", "1")]
    # Items of 3 and 2, 1.5 and 0.5, 1.5 and 0.5: errors of half their difference.
    assert rows_of(page, "held-out loss ±") == [
        ("0", "2.50 ± 0.50", "2"), ("2", "1.00 ± 0.50", "2"), ("4", "1.00 ± 0.50", "2"),
    ]  # fmt: skip
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Did it learn? Held-out loss did not clearly change", "Fixed prompts over time", "Optimizer", "What failed",
        "What was run", "Lineage",
    ]  # fmt: skip


def test_the_change_is_paired_by_medium_and_the_best_is_the_earliest_of_equals(tmp_path: Path):
    page = supervised_page(tmp_path)
    assert "Lowest: 1.00 ± 0.50 of policy 1, after 2 optimizer steps." in page
    assert "<span>change, paired by medium</span><b>−1.5<i> ± 0</i></b><span>n = 2</span>" in page


def test_a_loss_that_is_not_finite_is_neither_best_nor_drawn(tmp_path: Path):
    losses = [[[3.0]], [[float("nan")]], [[2.0]], [[float("inf")]]]
    updates = [finetuned(tmp_path, k, [0.5]) for k in range(3)]
    page = page_of(tmp_path, {"updates": updates, "judged": judged(tmp_path, dict(enumerate(losses)))}, reward="")
    assert [row[:2] for row in rows_of(page, "held-out loss ±")] == [("0", "3"), ("2", "2")]
    assert "Lowest: 2 of policy 2, after 2 optimizer steps." in page
    assert "<h3>Held-out loss</h3>" in page
    assert not re.search(r"\bnan\b|\binf\b", page)


def test_samples_are_shown_over_time_with_their_versions_and_without_scores(tmp_path: Path):
    shown = section(supervised_page(tmp_path), "film")
    versions = re.findall(r"<span>(policy \d)</span>(<b>)?", shown)
    assert versions == [("policy 0", ""), ("policy 1", ""), ("policy 2", "")] * 4
    assert [shown.count(f"<h3>{prompt.text}") for prompt in TEST] == [2, 2]
    sources = re.findall(r'src="([^"]+)"', shown)
    assert len(sources) == len({*sources}) == 12


@pytest.mark.parametrize(("count", "each"), [(MAX_POINTS, 1), (MAX_POINTS + 1, 2), (10 * MAX_POINTS, 10)])
def test_many_steps_are_drawn_as_means_of_some(tmp_path: Path, count: int, each: int):
    update = finetuned(tmp_path, 0, [float(step) for step in range(count)])
    series = losses([Trained.read(Artifact(update))])
    assert len(series.points) == -(-count // each) <= MAX_POINTS
    assert [step for step, _ in series.points[:3]] == [0, each, 2 * each]
    first = range(each)
    assert series.points[0][1].mean == np.mean(first)
    assert sum(point.n for _, point in series.points) == count
    assert series.label == ("loss" if each == 1 else f"loss, mean of {each} steps")
    # Steps that follow each other are not independent.
    assert not any(math.isfinite(point.error) for _, point in series.points)


def test_the_summary_of_the_stage_agrees_with_its_table(tmp_path: Path):
    """The best policy of the report and of the commands are the same."""
    for version, found in LOSSES.items():
        items = item_losses(Artifact(validated(tmp_path, version, found)))
        summary, means = summary_of(items), np.mean(found, axis=1)
        assert summary["loss"] == means.mean()
        assert summary["standard_error"] == pytest.approx(means.std(ddof=1) / len(means) ** 0.5)
