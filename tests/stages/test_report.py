"""Pages about small made-up runs: artifacts with known pictures and scores, committed as the stages would."""

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cosmos_rl_core.config.policy import SolverConfig
from cosmos_rl_core.datasets._base import Prompt
from cosmos_rl_core.errors import ArtifactError
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.attempt import Attempt
from stages.artifacts.layouts import cut
from stages.artifacts.request import Input, Request
from stages.artifacts.slots import input_of
from stages.contracts import MediaShape, ModelRef, OptimizerSteps
from stages.formats.generating import plan_samples, with_media
from stages.formats.samples import StoredSample, unit_files
from stages.formats.tables import to_parquet
from stages.reporting import pictures
from stages.reporting.curves import Curve, Series
from stages.reporting.numbers import Estimate
from tests.stages.conftest import make

MODEL = ModelRef(path="package:tiny-sd3", adapter="sd3", digest="0" * 64)
SHAPE = MediaShape(size=(4, 8), frames=1)
TRAIN = (Prompt(id="a", text="a sign <b>A & B</b>"), Prompt(id="b", text='a sign "C"'))
TEST = (Prompt(id="t", text="see http://example.com/x.png"), Prompt(id="u", text="plain"))
ROLLOUT_SCORES = [[0.0, 1.0, None, 0.25, 0.5, 0.5], [0.5, 1.0, 0.75, 1.0, 1.0, 0.5]]
EVALUATION_SCORES = [[0.0, 0.25, 0.5, 0.25], [0.5, 0.25, 1.0, None]]


def commit(slot: Path, request: Request, files: dict[str, bytes]) -> Input:
    """Make an artifact of these files stand."""
    generation, attempt_id, _ = Attempt.begin(request, print)
    attempt = Attempt(request, {}, generation, attempt_id)
    for name, data in files.items():
        attempt.put(name, data)
    attempt.commit(attempt.files, {}, print)
    return input_of(str(slot))


def ask(slot: Path, config: contracts.StageConfig, iteration: int | None, **inputs: Sequence[Input]) -> Request:
    roles = {role: tuple(sources) for role, sources in inputs.items()}
    return Request(stage=config.name, slot=str(slot), iteration=iteration, seed=7, config=config, inputs=roles)


def sample_set(
    prompts: tuple[Prompt, ...], n_generation: int, frames: int, shade: int, finite: bool = True
) -> dict[str, bytes]:
    """Samples in shards of two, each of a colour of its own."""
    plans = plan_samples(prompts, n_generation, 7, None)
    files: dict[str, bytes] = {}
    for number, unit in enumerate(cut(plans, 2)):
        stored: list[StoredSample] = []
        for place, plan in enumerate(unit):
            pixels = np.full((frames, 4, 8, 3), (shade, number * 40, place * 90), np.uint8)
            pixels[:, :, :, 0] += np.arange(frames, dtype=np.uint8)[:, None, None]
            stored.append(with_media(plan, pixels if finite else None, None, {}))
        files |= unit_files(number, stored)
    return files


def score_table(prompts: tuple[Prompt, ...], n_generation: int, scores: Sequence[float | None]) -> pd.DataFrame:
    plans = plan_samples(prompts, n_generation, 7, None)
    return pd.DataFrame(
        {
            "sample_id": [p.sample_id for p in plans],
            "prompt_id": [p.prompt.id for p in plans],
            "score": pd.Series(scores, dtype="float64"),
            "valid": [s is not None for s in scores],
            "error": ["ValueError: <i>no</i> text" if s is None else "" for s in scores],
            "details": "{}",
        }
    )


def score_files(table: pd.DataFrame) -> dict[str, bytes]:
    said = ["error", "details"]
    return {
        contracts.Reward.SCORES: to_parquet(table.drop(columns=said)),
        contracts.Reward.ANSWERS: to_parquet(table.drop(columns=["prompt_id", "score", "valid"])),
    }


def rollout_config() -> contracts.Rollout:
    numbers: dict[str, Any] = {"n_generation": 3, "sample": SolverConfig(num_steps=2), "batch_size": 2}
    return contracts.Rollout(model=MODEL, lora=None, prompts=TRAIN, media=SHAPE, samples_per_shard=2, **numbers)


def evaluate_config() -> contracts.Evaluate:
    numbers: dict[str, Any] = {"n_generation": 2, "num_steps": 2, "guidance_scale": 1.0, "batch_size": 2}
    return contracts.Evaluate(
        model=MODEL, prompts=TEST, media=SHAPE, max_prompt_length=8, samples_per_shard=2, **numbers
    )


def reward_config() -> contracts.Reward:
    return contracts.Reward.model_validate(
        {"reward": {"name": "jpeg"}, "scorer": "s", "max_attempts": 1, "max_failed_fraction": 0.5}, strict=False
    )


def update_config(k: int) -> contracts.Update:
    steps = OptimizerSteps(
        lrs=(1e-3,), ema_decays=(None,), betas=(0.9, 0.999), epsilon=1e-8, weight_decay=0.0, grad_norm_clip=1.0,
        first_step=k,
    )  # fmt: skip
    return contracts.Update.model_validate(
        {
            "model": MODEL, "lora": None, "gradient_checkpointing": False, "steps": steps,
            "sample": {"num_steps": 2},
            "algorithm": {"type": "nft", "dataset": {"name": "rendered_text"}}, "reward_weights": {"jpeg": 1.0},
            "keeps_ema": False, "old_decay": 0.0,
        }
    )  # fmt: skip


def policy(root: Path, frames: int = 1) -> Input:
    config = contracts.Policy(model=MODEL, from_scratch=False, lora=None)
    return commit(root / "policy", ask(root / "policy", config, None), {"current/00000.safetensors": b"weights 0"})


def make_iteration(root: Path, k: int, frames: int, finite: bool = True) -> dict[str, Input]:
    base = policy(root)
    slot = root / f"iterations/{k}"
    rollout = commit(
        slot / "rollout",
        ask(slot / "rollout", rollout_config(), k, policy=[base], embeddings=[base]),
        sample_set(TRAIN, 3, frames, 10 + k, finite),
    )
    table = score_table(TRAIN, 3, ROLLOUT_SCORES[k])
    scores = commit(
        slot / "reward",
        ask(slot / "reward", reward_config(), k, samples=[rollout]),
        score_files(table),
    )
    advantages = table[["sample_id", "prompt_id", "valid"]].assign(reward=table["score"], used=table["valid"])
    advantages["advantage"] = table["score"] * 2 - 1.25
    advantages["rollout"] = rollout.content
    metrics = pd.DataFrame([{"step": k, "loss": 0.5 / (k + 1), "grad_norm": 2.0, "lr": 1e-3, "old_deviation": 0.0}])
    roles = {"policy": [base], "rollouts": [rollout], "behaviours": [base], "scores": [scores], "embeddings": [base]}
    update = commit(
        slot / "update",
        ask(slot / "update", update_config(k), k, **roles),
        {
            "advantages.parquet": to_parquet(advantages),
            "metrics.parquet": to_parquet(metrics),
            "current/00000.safetensors": b"weights of " + str(k).encode(),
        },
    )
    return {"rollouts": rollout, "scores": scores, "updates": update}


def make_evaluation(root: Path, place: int) -> dict[str, Input]:
    base = policy(root)
    slot = root / f"exports/{place}"
    samples = commit(
        slot / "evaluate",
        ask(slot / "evaluate", evaluate_config(), None, export=[base]),
        sample_set(TEST, 2, 1, 100 + place),
    )
    table = score_table(TEST, 2, EVALUATION_SCORES[place])
    scores = commit(
        slot / "reward",
        ask(slot / "reward", reward_config(), 2 * place, samples=[samples]),
        score_files(table),
    )
    return {"evaluations": samples, "evaluation_scores": scores}


def inputs_of_run(root: Path, frames: int = 1) -> dict[str, list[Input]]:
    made = [make_iteration(root, k, frames) for k in (0, 1)] + [make_evaluation(root, place) for place in (0, 1)]
    roles = contracts.Report.inputs
    return {role: [found[role] for found in made if role in found] for role in roles}


def page_of(root: Path, inputs: dict[str, list[Input]], title: str = "my run", groups_shown: int = 1) -> str:
    config = contracts.Report(title=title, reward="jpeg", groups_shown=groups_shown)
    request = ask(root / "report", config, None, **inputs)
    make(request, root)
    return Artifact(input_of(request.slot)).read("index.html").decode()


@pytest.fixture(scope="module")
def run_inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Input]]:
    return inputs_of_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def page(tmp_path: Path, run_inputs: dict[str, list[Input]]) -> str:
    return page_of(tmp_path, run_inputs)


def rows_of(page: str, label: str) -> list[tuple[str, ...]]:
    """The table beneath a curve that holds the numbers of one of its series."""
    table = page[page.index(f"<th>{label}") :].partition("</table>")[0]
    return re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", table)


def expected(scores: Sequence[float | None]) -> Estimate:
    values: Any = pd.Series(scores, dtype="float64").dropna()
    return Estimate(values.mean(), values.sem(), len(values))


@pytest.mark.parametrize("scores", EVALUATION_SCORES)
def test_held_out_mean_and_standard_error_are_those_of_the_valid_samples(page: str, scores: list[float | None]):
    estimate = expected(scores)
    shown = f"<b>{estimate.shown}<i> {estimate.error_shown}</i></b>"
    assert f"{shown}<span>n = {sum(s is not None for s in scores)}</span>" in page


def test_the_change_is_paired_by_sample(page: str):
    change = expected([0.5, 0.0, 0.5])
    assert (
        f"<span>change, sample by sample</span><b>+{change.shown}<i> {change.error_shown}</i></b><span>n = 3<" in page
    )
    assert "2 of 3 scored samples got better, 0 worse" in page


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (0.5, 0.2, "rose"),
        (-0.5, 0.2, "fell"),
        (0.4, 0.2, "did not clearly change"),
        (0.4, float("nan"), "did not clearly change"),
    ],
)
def test_the_first_heading_says_whether_it_learned(change: float, error: float, words: str):
    assert Estimate(change, error, 8).direction == words


def test_the_curve_shows_each_iterations_mean_and_standard_error(page: str):
    numbers = [expected(scores) for scores in ROLLOUT_SCORES]
    assert rows_of(page, "training, mean") == [(str(k), str(e), str(e.n)) for k, e in enumerate(numbers)]


def test_held_out_points_stand_at_their_policy_versions(page: str):
    assert [place for place, _, _ in rows_of(page, "held-out ±")] == ["0", "2"]


def test_the_curve_is_drawn_in_the_colours_of_the_page(page: str):
    drawn = page[page.index("<svg") : page.index("</svg>")]
    assert {"var(--train)", "var(--held)", "var(--rule)", "var(--soft)"} == set(re.findall(r"var\(--\w+\)", drawn))
    assert not re.search(r"#[0-9a-f]{6}\b", drawn)
    assert "matplotlib" not in drawn
    points = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: var\(--(\w+)\); stroke', drawn)
    assert [ink for _, _, ink in points] == ["train", "train", "held", "held"]
    places = [float(x) for x, _, _ in points]
    assert places[0] == places[2] < places[1] < places[3]
    heights = [float(y) for _, y, _ in points]
    means = [expected(scores).mean for scores in ROLLOUT_SCORES + EVALUATION_SCORES]
    slopes = [(means[0] - m) / (y - heights[0]) for m, y in zip(means[1:], heights[1:], strict=True)]
    assert slopes == pytest.approx([slopes[0]] * 3, rel=1e-4)


def test_best_and_worst_of_the_widest_group_are_shown_with_their_advantages(page: str):
    first = page[page.index("Iteration 0") : page.index("Iteration 1")]
    assert "spread 1<" in first
    assert "spread 0.25" not in first
    rewards = re.findall(r"<span>(best|worst)</span><span>advantage ([^<]+)</span></div>.*?<b>([^<]+)</b>", first)
    assert rewards == [("best", "+0.75", "1"), ("worst", "−1.25", "0")]


def test_failed_samples_say_why_and_have_no_reward(page: str):
    first = page[page.index("Iteration 0") : page.index("Iteration 1")]
    assert "1 failed" in first
    assert "failed: ValueError: &lt;i&gt;no&lt;/i&gt; text" in first


def test_pairs_are_the_same_samples_coloured_by_their_change(page: str):
    shown = page[page.index("Base and final") : page.index("<h2>Iterations")]
    assert re.findall(r'class="card ([a-z]*)"', shown) == ["better", "", "better", ""]
    assert shown.count("<img") == 8


def test_every_text_is_escaped(tmp_path: Path, run_inputs: dict[str, list[Input]]):
    page = page_of(tmp_path, run_inputs, title="<script>1</script>", groups_shown=2)
    assert "&lt;script&gt;" in page
    assert "a sign &lt;b&gt;A &amp; B&lt;/b&gt;" in page
    assert "<script" not in page
    assert "<b>A" not in page


def test_the_page_needs_nothing_from_elsewhere(page: str):
    sources = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')>]*)", page)
    places = {source for source in sources if not source.startswith("data:image/png;base64,")}
    assert len(places) < len(sources)
    assert all(place.startswith("#") and page.count(f'id="{place[1:]}"') == 1 for place in places)


def test_equal_inputs_give_equal_bytes_and_name_no_place(tmp_path: Path, page: str):
    again = page_of(tmp_path / "again", inputs_of_run(tmp_path / "other"))
    assert again == page
    assert str(tmp_path) not in page


def test_the_shown_policy_is_the_one_that_was_used_or_made(page: str, run_inputs: dict[str, list[Input]]):
    update = Artifact(run_inputs["updates"][0]).manifest
    assert f"current {update.part_content('current')[:12]}" in page
    assert update.content[:12] in page


def test_a_video_is_shown_by_three_frames(tmp_path: Path):
    inputs = {"rollouts": [make_iteration(tmp_path, 0, frames=7)["rollouts"]]}
    page = page_of(tmp_path, inputs)
    assert "<img" not in page  # Nothing is scored: there is no best and no worst.
    made = make_iteration(tmp_path, 0, frames=7)
    page = page_of(tmp_path, {role: [source] for role, source in made.items()})
    frames = re.findall(r'<div class="frames">(.*?)</div>', page)
    assert [images.count("<img") for images in frames] == [3, 3, 3]


def test_a_sample_that_is_not_finite_has_words_in_its_pictures_place(tmp_path: Path):
    made = make_iteration(tmp_path, 0, frames=1, finite=False)
    page = page_of(tmp_path, {role: [source] for role, source in made.items()})
    assert page.count('<div class="frames"><p class="failed">no picture: the sample is not finite</p></div>') == 3
    assert "<img" not in page


def test_large_pictures_are_shrunk():
    pixels = np.random.default_rng(0).integers(0, 256, (1024, 512, 3), np.uint8)
    source = pictures.data_uri(pixels)
    assert source.startswith("data:image/jpeg;base64,")
    assert len(source) < 100_000


@pytest.mark.parametrize("roles", [(), ("updates",), ("evaluations",), ("rollouts", "updates"), ("rollouts", "scores")])
def test_any_input_may_be_missing(tmp_path: Path, run_inputs: dict[str, list[Input]], roles: tuple[str, ...]):
    page = page_of(tmp_path, {role: run_inputs[role] for role in roles})
    assert "<h1>my run</h1>" in page
    assert "nan" not in page.replace("provenance", "")


def test_without_rewards_the_loss_is_drawn(tmp_path: Path, run_inputs: dict[str, list[Input]]):
    page = page_of(tmp_path, {"updates": run_inputs["updates"]})
    assert rows_of(page, "loss") == [("0", "0.5", "1"), ("1", "0.25", "1")]


def test_scores_must_be_of_the_samples(tmp_path: Path, run_inputs: dict[str, list[Input]]):
    few = run_inputs | {"scores": run_inputs["scores"][:1]}
    with pytest.raises(ArtifactError, match="2 rollouts but 1 scores"):
        page_of(tmp_path, few)


@pytest.mark.parametrize(
    ("mean", "error", "words"),
    [(0.5, 0.0123, "0.500 ± 0.012"), (-21.26, 1.5, "−21.3 ± 1.5"), (0.5, float("nan"), "0.5"), (3.0, 0.0, "3 ± 0")],
)
def test_an_estimate_has_as_many_digits_as_its_error_allows(mean: float, error: float, words: str):
    assert str(Estimate(mean, error, 4)) == words


@pytest.mark.parametrize("line", [True, False])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_a_mean_without_a_finite_error_is_drawn_without_a_bar(error: float, line: bool):
    series = Series("scores", [(0, Estimate(1.0, error, 4)), (1, Estimate(2.0, 0.1, 4))], line)
    bare = Series("scores", [(0, Estimate(1.0, 0.0, 4)), (1, Estimate(2.0, 0.1, 4))], line)
    assert Curve("Reward", "version", [series]).svg() == Curve("Reward", "version", [bare]).svg()


def test_a_curve_of_nothing_is_left_out(tmp_path: Path, run_inputs: dict[str, list[Input]]):
    page = page_of(tmp_path, {"rollouts": run_inputs["rollouts"]})
    assert "<svg" not in page


def test_the_stage_starts_without_torch():
    program = "import stages.report, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
