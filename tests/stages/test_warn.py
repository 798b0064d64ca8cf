"""Limits on scores, judged on samples whose means, deviations and standard errors are known."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from cosmos_rl_core.config.early_warning import Limit
from cosmos_rl_core.errors import ConfigError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input
from stages.artifacts.slots import input_of
from tests.stages.conftest import make
from tests.stages.made_up import (
    TRAIN,
    ask,
    commit,
    policy,
    reward_config,
    rollout_config,
    sample_set,
    score_files,
    score_table,
)

Scores = list[float | None]
FIRST: Scores = [0.0, 1.0, 2.0, 2.0, 3.0, 4.0]
"""Two prompts with means of 1 and 3: a mean of 2, a deviation of sqrt(2), a standard error of 1."""


def scored(root: Path, k: int, scores: Scores, **others: Scores) -> Input:
    """Scores by ``jpeg`` of the six samples of an iteration, and other numbers that it gave."""
    table = score_table(TRAIN, 3, scores)
    rows = [dict(zip(others, row, strict=True)) for row in zip(*others.values(), strict=True)]
    table["details"] = [json.dumps(row) for row in rows] or "{}"
    slot = root / f"iterations/{k}/reward-jpeg"
    samples = input_of(str(root / "iterations/0/rollout"), "index", "media")
    return commit(slot, ask(slot, reward_config(), k, samples=[samples]), score_files(table))


def judge(root: Path, first: Input, now: Input, *limits: dict[str, Any]) -> tuple[Manifest, dict[str, Any]]:
    """The warning of iteration 1, and its evidence."""
    slot = root / "iterations/1/warn"
    samples = input_of(str(root / "iterations/0/rollout"), "index", "media")
    config = contracts.Warn(rewards=("jpeg",), limits=tuple(Limit(reward="jpeg", **limit) for limit in limits))
    manifest = make(ask(slot, config, 1, samples=[samples], scores=[now], first=[first]), root)
    return manifest, Artifact(input_of(str(slot))).json(contracts.Warn.EVIDENCE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the pictures of a rollout."""
    slot = tmp_path / "iterations/0/rollout"
    base = policy(tmp_path)
    request = ask(slot, rollout_config(), 0, policy=[base], embeddings=[base])
    commit(slot, request, sample_set(TRAIN, 3, 1, 10))
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "trips"),
    [
        ({"rise": 2.1}, True), ({"rise": 2.2}, False), ({"fall": 0.1}, False),
        ({"above": 4.9}, True), ({"above": 5.1}, False), ({"below": 5.1}, True), ({"below": 4.9}, False),
    ],
)  # fmt: skip
def test_a_mean_that_rises_by_three_trips_what_is_narrower(root: Path, limit: dict[str, float], trips: bool):
    first = scored(root, 0, FIRST)
    manifest, evidence = judge(root, first, scored(root, 1, [score + 3 for score in FIRST if score is not None]), limit)
    (level,) = evidence["levels"]
    assert level["first"] == {"n": 6, "mean": 2.0, "deviation": pytest.approx(math.sqrt(2)), "error": 1.0}
    # Both means have an error of 1, their difference one of sqrt(2).
    assert (level["now"]["mean"], level["drift"]) == (5.0, pytest.approx(3 / math.sqrt(2)))
    assert level["z"] == pytest.approx(3 / math.sqrt(2))
    assert manifest.summary["tripped"] == int(trips)
    assert manifest.summary["jpeg_z"] == level["z"]
    rows = [(row["bound"], row["mean"], row["drift"]) for row in evidence["tripped"]]
    assert rows == [(*limit, 5.0, level["drift"])] * trips


def test_a_fall_names_the_lowest_samples_and_shows_them(root: Path):
    now = scored(root, 1, [-7.0, 1.0, 0.0, 0.0, -9.0, 0.0])
    manifest, evidence = judge(root, scored(root, 0, FIRST), now, {"fall": 4.0, "rise": 4.0})
    (row,) = evidence["tripped"]
    assert row["bound"] == "fall"
    assert row["drift"] == pytest.approx(-4.5 / math.hypot(1.0, 0.5))
    assert [score for _, score in row["samples"]] == [-9.0, -7.0, 0.0, 0.0, 0.0, 1.0]
    assert evidence["scores"] == {"jpeg": now.content}
    page = Artifact(input_of(manifest.slot)).read(contracts.Warn.PAGE).decode()
    assert "jpeg fell from 2 to −2.5" in page
    assert page.count("data:image/webp") == 6


def test_other_numbers_of_a_reward_have_limits_too_and_samples_without_a_score_count_nowhere(root: Path):
    first = scored(root, 0, [*FIRST[:5], None], luma=[0.5, 0.5, 0.5, 0.5, 0.5, 9.0])
    now = scored(root, 1, FIRST, luma=[0.75] * 6)
    _, evidence = judge(root, first, now, {"score": "luma", "rise": 1000.0})
    luma = {row["score"]: row for row in evidence["levels"]}["luma"]
    assert luma["first"] == {"n": 5, "mean": 0.5, "deviation": 0.0, "error": 0.0}
    # Beyond any number of standard errors, which JSON has no number for.
    assert (luma["z"], luma["drift"]) == (None, None)
    assert [row["score"] for row in evidence["tripped"]] == ["luma"]


def test_a_score_that_the_reward_does_not_give_is_a_mistake(root: Path):
    first = scored(root, 0, FIRST, luma=FIRST)
    with pytest.raises(ConfigError, match="jpeg gives no score 'lumen'; it gives jpeg, luma"):
        judge(root, first, scored(root, 1, FIRST, luma=FIRST), {"score": "lumen", "above": 1.0})


def test_equal_scores_have_no_drift_even_where_nothing_varies(root: Path):
    same: Scores = [0.5] * 6
    manifest, evidence = judge(root, scored(root, 0, same), scored(root, 1, same), {"rise": 0.1, "fall": 0.1})
    assert manifest.summary["tripped"] == 0
    assert (evidence["levels"][0]["drift"], evidence["levels"][0]["z"]) == (0.0, 0.0)
    assert contracts.Warn.PAGE not in manifest.files
