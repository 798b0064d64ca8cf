"""Limits on scores, judged on samples whose means, deviations and standard errors are known."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.config.early_warning import Limit
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ConfigError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Input
from stages.artifacts.slots import input_of
from tests.stages.conftest import make
from tests.stages.made_up import (
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
PROMPTS = tuple(Prompt(id=name, text=f'a sign "{name}"') for name in "abcd")
FIRST: Scores = [0.0, 2.0, 0.0, 2.0, 2.0, 4.0, 2.0, 4.0]
"""Prompts with means of 1, 1, 3 and 3: a mean of 2, a deviation of sqrt(16 / 7), a standard error of sqrt(1 / 3)."""


def scored(root: Path, k: int, scores: Scores, **others: Scores) -> Input:
    """Scores by ``jpeg`` of the two samples of each prompt of an iteration, and other numbers that it gave."""
    table = score_table(PROMPTS[: len(scores) // 2], 2, scores)
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
    commit(slot, request, sample_set(PROMPTS, 2, 1, 10))
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "trips"),
    [
        ({"rise": 3.6}, True), ({"rise": 3.7}, False), ({"fall": 0.1}, False),
        ({"above": 4.9}, True), ({"above": 5.1}, False), ({"below": 5.1}, True), ({"below": 4.9}, False),
    ],
)  # fmt: skip
def test_a_mean_that_rises_by_3_trips_only_narrower_limits(root: Path, limit: dict[str, float], trips: bool):
    first = scored(root, 0, FIRST)
    manifest, evidence = judge(root, first, scored(root, 1, [score + 3 for score in FIRST if score is not None]), limit)
    (level,) = evidence["levels"]
    deviation, error = math.sqrt(16 / 7), math.sqrt(1 / 3)
    numbers = {"mean": 2.0, "deviation": pytest.approx(deviation), "error": pytest.approx(error)}
    assert level["first"] == {"n": 8, "prompts": 4, **numbers}
    # Both means have an error of sqrt(1 / 3), their difference one of sqrt(2 / 3).
    assert (level["now"]["mean"], level["drift"]) == (5.0, pytest.approx(3 / math.sqrt(2 / 3)))
    assert level["z"] == pytest.approx(3 / deviation)
    assert evidence["undecided"] == []
    assert "undecided" not in manifest.summary
    assert manifest.summary["tripped"] == int(trips)
    assert manifest.summary["jpeg_z"] == level["z"]
    rows = [(row["bound"], row["mean"], row["drift"]) for row in evidence["tripped"]]
    assert rows == [(*limit, 5.0, level["drift"])] * trips


def test_a_limit_on_falls_names_and_shows_the_lowest_samples(root: Path):
    now = scored(root, 1, [-7.0, 1.0, 0.0, 0.0, -9.0, 0.0, 0.0, 0.0])
    manifest, evidence = judge(root, scored(root, 0, FIRST), now, {"fall": 3.0, "rise": 3.0})
    (row,) = evidence["tripped"]
    assert row["bound"] == "fall"
    # Means of -3, 0, -4.5 and 0.
    assert row["drift"] == pytest.approx(-3.875 / math.hypot(math.sqrt(1 / 3), np.std([3, 0, 4.5, 0], ddof=1) / 2))
    assert [score for _, score in row["samples"]] == [-9.0, -7.0, 0.0, 0.0, 0.0, 0.0]
    assert evidence["scores"] == {"jpeg": now.content}
    page = Artifact(input_of(manifest.slot)).read(contracts.Warn.PAGE).decode()
    assert "jpeg fell from 2 to −1.875" in page
    assert page.count("data:image/webp") == 6


def test_limits_may_be_on_any_number_of_a_reward_over_scored_samples(root: Path):
    first = scored(root, 0, [*FIRST[:7], None], luma=[*[0.5] * 7, 9.0])
    now = scored(root, 1, FIRST, luma=[0.75] * 8)
    _, evidence = judge(root, first, now, {"score": "luma", "rise": 1000.0})
    luma = {row["score"]: row for row in evidence["levels"]}["luma"]
    assert luma["first"] == {"n": 7, "prompts": 4, "mean": 0.5, "deviation": 0.0, "error": 0.0}
    # Beyond any number of standard errors, which JSON has no number for.
    assert (luma["z"], luma["drift"]) == (None, None)
    assert [row["score"] for row in evidence["tripped"]] == ["luma"]


def test_a_limit_on_a_number_that_iteration_0_has_not_trips_too(root: Path):
    first = scored(root, 0, FIRST, luma=[None] * 8)
    _, evidence = judge(root, first, scored(root, 1, FIRST, luma=[0.75] * 8), {"score": "luma", "above": 0.5})
    (row,) = evidence["tripped"]
    assert (row["mean"], row["first"], row["z"]) == (0.75, None, None)


def test_a_limit_on_a_score_that_the_reward_does_not_give_is_refused(root: Path):
    first = scored(root, 0, FIRST, luma=FIRST)
    with pytest.raises(ConfigError, match="jpeg gives no score 'lumen'; it gives jpeg, luma"):
        judge(root, first, scored(root, 1, FIRST, luma=FIRST), {"score": "lumen", "above": 1.0})


def test_equal_scores_have_no_drift_even_without_any_variation(root: Path):
    same: Scores = [0.5] * 8
    manifest, evidence = judge(root, scored(root, 0, same), scored(root, 1, same), {"rise": 0.1, "fall": 0.1})
    assert manifest.summary["tripped"] == 0
    assert (evidence["levels"][0]["drift"], evidence["levels"][0]["z"]) == (0.0, 0.0)
    assert contracts.Warn.PAGE not in manifest.files


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("few_first", [True, False])
def test_fewer_than_four_prompts_on_either_side_give_no_verdict_on_drift(root: Path, count: int, few_first: bool):
    """Their standard errors say so little that honest runs would trip."""
    far: Scores = [score + 100 for score in FIRST if score is not None]
    few = 2 * count
    first, now = (FIRST[:few], far) if few_first else (FIRST, far[:few])
    limit = {"rise": 0.1, "fall": 0.1, "above": 50.0}
    manifest, evidence = judge(root, scored(root, 0, first), scored(root, 1, now), limit)
    (level,) = evidence["levels"]
    assert level["drift"] is None
    # A limit on the mean itself asks for no error.
    assert [row["bound"] for row in evidence["tripped"]] == ["above"]
    prompts = {"now": 4 if few_first else count, "first": count if few_first else 4}
    unjudged = {"reward": "jpeg", "score": "jpeg", "prompts": prompts}
    assert evidence["undecided"] == [unjudged | {"bound": "fall"}, unjudged | {"bound": "rise"}]
    assert (manifest.summary["tripped"], manifest.summary["undecided"]) == (1, 2)
