"""Fragments: what of an iteration or of an evaluated policy outlives its samples."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.canonical import canonical_json
from cosmos_rl_core.config.early_warning import Limit
from cosmos_rl_core.config.train import Gate
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.storage import media
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.layouts import cut
from stages.artifacts.request import Input
from stages.artifacts.slots import drop, input_of
from stages.formats.samples import unit_files
from stages.fragment import MOST_BYTES
from stages.generating.encoding import with_media
from stages.generating.plans import plan_samples
from stages.reporting.contracts import WEIGHTED, Fragment
from stages.reporting.excerpt import Excerpt
from tests.stages.conftest import make
from tests.stages.made_up import (
    EVALUATION_SCORES,
    ROLLOUT_SCORES,
    TEST,
    TRAIN,
    Inputs,
    ask,
    commit,
    evaluate_config,
    evaluation,
    excerpt,
    fragment,
    iteration,
    judged,
    policy,
    rollout,
    score_table,
    scored,
)


def test_the_numbers_of_an_iteration_follow_from_its_samples(tmp_path: Path):
    found = excerpt(iteration(tmp_path, 0)["fragments"])
    known = pd.Series(ROLLOUT_SCORES[0], dtype="float64").dropna()
    score = found.score("jpeg")
    assert score is not None
    assert (found.samples, found.prompts, found.scored, found.alike) == (6, 2, 5, 0)
    assert (score.mean, score.deviation) == pytest.approx((known.mean(), known.std()))
    # To the mean of 0.45, prompt a lacks -0.1 and b 0.1: sqrt(2 (0.1^2 + 0.1^2)) / 5.
    assert (score.error, score.clusters) == (pytest.approx(0.04), 2)
    assert (score.quantiles[0], score.quantiles[16], score.quantiles[-1]) == (0.0, known.median(), 1.0)
    assert [(one.prompt_id, one.mean, one.n) for one in found.by_prompt] == [("a", 0.5, 2), ("b", 1.25 / 3, 3)]
    assert [(one.what, one.reason, one.count) for one in found.failures] == [
        ("no score", "ValueError: <i>no</i> text", 1)
    ]


def test_equal_inputs_give_equal_fragments_wherever_they_are(tmp_path: Path):
    one, other = (iteration(tmp_path / name, 1, frames=5)["fragments"] for name in "ab")
    assert one.content == other.content
    assert str(tmp_path).encode() not in Artifact(one).read("fragment.json")


def test_pictures_stay_when_the_rollouts_media_are_deleted(tmp_path: Path):
    made = iteration(tmp_path, 0)
    drop(made["samples"].url, contracts.MEDIA)
    kept = excerpt(made["fragments"])
    artifact = Artifact(made["fragments"])
    for picture in kept.pictures.values():
        assert picture.thumb.startswith("data:image/webp;base64,")
        assert media.decode("png", artifact.read(picture.full)).shape == (1, 4, 8, 3)
    # A fragment that comes too late has its numbers all the same.
    samples = input_of(made["samples"].url, contracts.INDEX, contracts.MEDIA)
    late = excerpt(fragment(tmp_path, 0, name="late", inputs={"samples": [samples], "scores": [made["scores"]]}))
    assert late.scores == kept.scores
    assert {one.missing for one in late.pictures.values()} == {"the picture was deleted (rollout.keep.media)"}


def test_a_video_is_three_frames_and_a_file_that_browsers_play(tmp_path: Path):
    made = iteration(tmp_path, 0, frames=7)["fragments"]
    picture = excerpt(made).chosen("best")[0]
    assert (picture.width, picture.height, picture.is_video) == (24, 4, True)
    frames = media.decode("mp4", Artifact(made).read(picture.full))
    assert frames.shape == (7, 4, 8, 3)


def noise(version: int) -> dict[str, bytes]:
    """Samples of 24 prompts, each a video of noise."""
    draws, files = np.random.default_rng(version), dict[str, bytes]()
    for number, plans in enumerate(cut(plan_samples(MANY, 1, 7, None), 8)):
        pixels = draws.integers(0, 256, (len(plans), 3, 64, 64, 3), np.uint8)
        stored = [with_media(plan, one, None, {}) for plan, one in zip(plans, pixels, strict=True)]
        files |= unit_files(number, stored)
    return files


MANY = tuple(Prompt(id=f"{number:02d}", text=f"a sign {number}") for number in range(24))


def test_videos_of_noise_that_do_not_fit_are_left_out(tmp_path: Path):
    ends: list[dict[str, Input]] = []
    for version in (0, 1):
        slot = tmp_path / f"exports/{version}/evaluate"
        samples = commit(slot, ask(slot, evaluate_config(), None, export=[policy(tmp_path)]), noise(version))
        # Half of the samples rise, and the others fall.
        scores = [(number % 2) ^ version for number in range(24)]
        table = score_table(MANY, 1, [float(score) for score in scores])
        ends.append({"samples": samples, "scores": scored(tmp_path, samples, version, table)})
    found = excerpt(judged(tmp_path, 1, *ends))
    shown = [*found.pictures.values(), *found.first.values()]
    left_out = [one for one in shown if not one.thumb]
    assert len(found.encode()) <= MOST_BYTES
    assert len(shown) > 2 * len(left_out) > 0
    assert {one.missing for one in left_out} == {"no small picture: it would be too large for this page"}
    assert all(one.full for one in shown)


def test_held_out_samples_are_compared_with_version_0(tmp_path: Path):
    ends = [evaluation(tmp_path, 2 * place, scores) for place, scores in enumerate(EVALUATION_SCORES)]
    first, last = (excerpt(judged(tmp_path, 2 * place, ends[0], one)) for place, one in enumerate(ends))
    assert (first.changes, first.first) == ((), {})
    (change,) = last.changes
    assert (change.of, change.n, change.better, change.worse) == ("jpeg", 3, 2, 0)
    # Prompt t rose by 0.5 and 0, prompt u by 0.5.
    assert (change.mean, change.clusters) == (pytest.approx(1 / 3), 2)
    # Prompts move the mean before by 1/16, after, where u has one sample, by 5/36: 2 (5/36 - 1/16).
    assert change.error == pytest.approx(11 / 72)
    assert last.shown["improved"] == tuple(last.first)
    assert [(last.first[i].score, last.pictures[i].score) for i in last.first] == [(0.0, 0.5), (0.5, 1.0)]
    assert first.shown["fixed"] == last.shown["fixed"]


def test_gated_samples_are_counted_with_their_bounds(tmp_path: Path):
    samples = rollout(tmp_path, 0)
    scores = scored(tmp_path, samples, 0, score_table(TRAIN, 3, ROLLOUT_SCORES[0]))
    gate = Gate(min=0.4, max=None, on_fail="exclude", max_gated_fraction=1.0)
    config = Fragment(held_out=False, rewards=("jpeg",), headline="jpeg", gates={"jpeg": gate})
    slot = tmp_path / "gated"
    make(ask(slot, config, 0, samples=[samples], scores=[scores]), tmp_path)
    found = excerpt(input_of(str(slot))).failures
    assert [(one.what, one.reason, one.count) for one in found[1:]] == [("gated", "beyond min 0.4: exclude", 2)]


SCORES = {
    "ocr": ([0.2, 0.2, 0.2, 0.2], [0.5, 0.7, 1.0, None]),
    "jpeg": ([0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
    "sharp": ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0]),
}
"""Scores of four held-out samples of two policies, by the reward."""


def test_the_held_out_sum_takes_samples_with_all_rewards_that_pass_every_gate(tmp_path: Path):
    gate = Gate(min=0.5, max=None, on_fail="exclude", max_gated_fraction=1.0)
    weights = {"ocr": 1.0, "jpeg": 0.5}
    found: list[Excerpt] = []
    inputs: Inputs = {}
    for version in (0, 1):
        samples = evaluation(tmp_path, version)["samples"]
        tables = [score_table(TEST, 2, SCORES[name][version]) for name in SCORES]
        scores = [scored(tmp_path, samples, 10 * version + n, table) for n, table in enumerate(tables)]
        first = {"first": inputs["samples"], "first_scores": inputs["scores"]} if version else {}
        inputs = {"samples": [samples], "scores": scores}
        config = Fragment(held_out=True, rewards=tuple(SCORES), headline="ocr", weights=weights, gates={"sharp": gate})
        slot = tmp_path / f"weighted-{version}"
        make(ask(slot, config, version, **inputs, **first), tmp_path)
        found.append(excerpt(input_of(str(slot))))
    before, after = (one.score(WEIGHTED) for one in found)
    assert before is not None
    assert after is not None
    # Of version 1 the third sample fails the gate, and the fourth has no score of ocr.
    assert (before.mean, before.n, before.clusters) == (pytest.approx(0.45), 4, 2)
    assert (after.mean, after.n, after.clusters) == (pytest.approx(0.6), 2, 1)
    (change,) = [one for one in found[1].changes if one.of == WEIGHTED]
    assert (change.mean, change.better, change.worse) == (pytest.approx(0.15), 2, 0)
    assert not [one for one in found[1].failures if one.what == "gated"]


def test_there_is_no_weighted_sum_if_no_held_out_sample_passes_the_gates(tmp_path: Path):
    samples = evaluation(tmp_path, 0)["samples"]
    scores = [scored(tmp_path, samples, n, score_table(TEST, 2, SCORES["ocr"][0])) for n in (0, 1)]
    gate = Gate(min=0.5, max=None, on_fail="exclude", max_gated_fraction=1.0)
    names = ("ocr", "sharp")
    config = Fragment(
        held_out=True, rewards=names, headline="ocr", weights={"ocr": 1.0}, gates=dict.fromkeys(names, gate)
    )
    make(ask(tmp_path / "none", config, 0, samples=[samples], scores=scores), tmp_path)
    found = excerpt(input_of(str(tmp_path / "none"))).score(WEIGHTED)
    assert found is not None
    assert (found.mean, found.n) == (None, 0)


def test_samples_that_exceed_a_limit_are_shown(tmp_path: Path):
    samples = rollout(tmp_path, 0)
    scores = scored(tmp_path, samples, 0, score_table(TRAIN, 3, ROLLOUT_SCORES[0]))
    limit = Limit(reward="jpeg", above=0.25)
    slot = tmp_path / "warn"
    config = contracts.Warn(rewards=("jpeg",), limits=(limit,))
    make(ask(slot, config, 0, samples=[samples], scores=[scores], first=[scores]), tmp_path)
    inputs = {"samples": [samples], "scores": [scores], "warnings": [input_of(str(slot))]}
    found = excerpt(fragment(tmp_path, 0, inputs=inputs))
    assert [one.words for one in found.tripped] == [
        "jpeg is 0.45, above the limit of 0.25 (iteration 0: 0.45, z-score +0)"
    ]
    assert [picture.score for picture in found.chosen("tripped")] == [1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(("prompts", "error"), [(1, None), (8, 0.25)])
def test_fragments_of_earlier_versions_are_read_with_their_errors_over_prompts(prompts: int, error: float | None):
    """They had errors over samples too, and took those for the errors of a single prompt."""
    score = {"reward": "jpeg", "score": "jpeg", "n": 64, "mean": 0.5, "deviation": 0.8}
    score |= {"error": 0.1, "prompt_error": 0.25}
    change = {"of": "jpeg", "mean": 0.1, "error": 0.25, "n": 64, "better": 40, "worse": 24}
    of_loss = change | {"of": "held-out loss", "n": 5}
    old = {"k": 2, "prompts": prompts, "scores": [score], "changes": [change, of_loss]}
    old["loss"] = {"mean": 1.0, "error": 0.2, "n": 5}
    found = Excerpt.read(canonical_json(old), "fragment.json")
    assert [(one.error, one.clusters) for one in (*found.scores, found.changes[0])] == [(error, prompts)] * 2
    assert found.loss is not None
    assert [(one.error, one.clusters) for one in (found.changes[1], found.loss)] == [(0.25, 5), (0.2, 5)]
    assert Excerpt.read(found.encode(), "fragment.json") == found
