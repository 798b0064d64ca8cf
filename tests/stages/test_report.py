"""Pages about small made-up runs, from fragments by the real stage."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from cosmos_rl_core.errors import ArtifactError
from cosmos_rl_core.estimates.estimate import Estimate, mean_of
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Input
from stages.reporting.book import Book, Piece
from stages.reporting.contracts import WEIGHTED
from stages.reporting.excerpt import HELD_OUT_LOSS, Change, Excerpt, Failure, Loss, Score, Tripped
from stages.reporting.page import report_page
from stages.reporting.scores import moved, signs
from tests.stages.made_up import EVALUATION_SCORES, ROLLOUT_SCORES, fragment, inputs_of_run, iteration, page_of


@pytest.fixture(scope="module")
def run_inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Input]]:
    return inputs_of_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, run_inputs: dict[str, list[Input]]) -> str:
    about = (("model", "tiny (sd3)"), ("algorithm", "nft"), ("seed", "7"))
    settings = (("train.optm_lr", "0.01"),)
    return page_of(tmp_path_factory.mktemp("page"), run_inputs, about=about, settings=settings, roles={"jpeg": "train"})


def rows_of(page: str, label: str) -> list[tuple[str, ...]]:
    """The table beneath a curve that holds the numbers of one of its series."""
    table = page[page.index(f"<th>{label}") :].partition("</table>")[0]
    return re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", table)


def section(page: str, name: str) -> str:
    """One section of a page."""
    return page[page.index(f'<section id="{name}"') :].partition("</section>")[0]


def expected(scores: Sequence[float | None]) -> Estimate:
    """The estimate over two prompts with as many samples each."""
    return mean_of(pd.Series(scores, dtype="float64"), [i // (len(scores) // 2) for i in range(len(scores))])


@pytest.mark.parametrize("scores", EVALUATION_SCORES)
def test_held_out_means_are_over_valid_samples_and_errors_over_prompts(page: str, scores: list[float | None]):
    estimate = expected(scores)
    shown = f"<b>{estimate.shown}<i> {estimate.error_shown}</i></b>"
    assert f"{shown}<span>n = {sum(s is not None for s in scores)}</span>" in section(page, "learned")


def test_the_change_is_over_shared_samples_and_its_error_is_paired_by_prompt(page: str):
    # See test_fragment.
    change = Estimate(1 / 3, 11 / 72, 3, 2)
    told = f"<b>+{change.shown}<i> {change.error_shown}</i></b><span>n = 3<"
    assert f"<span>change, paired by prompt</span>{told}" in page
    assert "Of 3 held-out samples 2 got better and 0 worse" in page


@pytest.mark.parametrize(
    ("change", "error", "prompts", "words"),
    [
        (0.5, 0.2, 4, "rose"),
        (-0.5, 0.2, 4, "fell"),
        (0.4, 0.2, 4, "did not clearly change"),
        (0.5, 0.2, 3, "did not clearly change"),
        (0.4, float("nan"), 8, "did not clearly change"),
    ],
)
def test_the_first_heading_says_whether_the_policy_learned(change: float, error: float, prompts: int, words: str):
    assert Estimate(change, error, 8, prompts).direction == words


def test_the_curve_shows_each_iterations_mean_and_standard_error(page: str):
    numbers = [expected(scores) for scores in ROLLOUT_SCORES]
    assert rows_of(page, "training, mean") == [(str(k), str(e), str(e.n)) for k, e in enumerate(numbers)]


def test_a_page_of_prompts_without_references_does_not_mention_them(page: str):
    assert not re.search(r"references|reference \d", page)


def test_held_out_points_are_drawn_at_their_policy_versions(page: str):
    assert [place for place, _, _ in rows_of(page, "held-out ±")] == ["0", "2"]


def test_scores_are_compared_with_iteration_0_in_its_deviations(page: str):
    cells = re.findall(r"<td>(.*?)</td>", section(page, "hacking"))
    first, last = (pd.Series(scores, dtype="float64") for scores in ROLLOUT_SCORES)
    z = float(f"{(last.mean() - first.mean()) / first.std():.3g}")
    assert cells[:2] == ["jpeg", "trains"]
    means = [f"{one.shown}<i>{one.error_shown}</i>" for one in map(expected, ROLLOUT_SCORES)]
    assert cells[3:6] == [*means, f"+{z}"]


def rising(*tripped: Tripped) -> Book:
    """A run whose reward rose in training and on held-out samples."""

    def score(mean: float) -> Score:
        return Score(reward="jpeg", score="jpeg", n=8, mean=mean, deviation=1.0, error=0.1, clusters=8)

    change = Change(of="jpeg", mean=1.0, error=0.1, n=8, clusters=8, better=8, worse=0)
    excerpts = Excerpt(k=0, scores=(score(0.0),)), Excerpt(k=1, scores=(score(1.0),), tripped=tripped)
    judged = Excerpt(k=0), Excerpt(k=2, changes=(change,))
    iterations, versions = ([*map(Piece, some)] for some in (excerpts, judged))
    return Book(title="rising", reward="jpeg", roles={"jpeg": "train"}, iterations=iterations, judged=versions)


def test_rewards_that_rise_together_speak_for_learning_unless_a_limit_tripped():
    heading = "<h2>Is it hacking the reward? "
    assert [kind for kind, _ in signs(rising(), moved(rising()))] == ["good", "good"]
    assert f"{heading}No sign of it</h2>" in report_page(rising()).decode()
    hacked = rising(Tripped(words="luma rose", reward="luma", score="luma", samples=()))
    (limits, words), (both, _) = signs(hacked, moved(hacked))
    assert (limits, both) == ("bad", "")
    assert words == "Limits of early warning tripped once in 1 iteration, first in iteration 1: luma rose."
    assert f"{heading}Perhaps: there are signs of it</h2>" in report_page(hacked).decode()


def ranked(by: str, **more: Any) -> Book:
    """A run that trains on jpeg, whose held-out numbers all rose from 1 to 2."""
    names = ("jpeg", "ocr", WEIGHTED)

    def judged(k: int, mean: float) -> Piece:
        scores = (Score(reward=n, score=n, n=8, mean=mean, deviation=1.0, error=0.1, clusters=8) for n in names)
        loss = Loss(mean=mean, error=0.1, n=8, clusters=8)
        of = (*names, HELD_OUT_LOSS) if k else ()
        changes = (Change(of=n, mean=1.0, error=0.1, n=8, clusters=8, better=8, worse=0) for n in of)
        return Piece(Excerpt(k=k, scores=tuple(scores), changes=tuple(changes), loss=loss))

    return Book(**{"title": "t", "reward": "jpeg", "ranked_by": by, "judged": [judged(0, 1.0), judged(2, 2.0)], **more})


@pytest.mark.parametrize(
    ("by", "headings", "curves"),
    [
        ("jpeg", ["Did it learn? Held-out jpeg rose", "Held-out loss rose"], ["Reward", "Held-out loss"]),
        (
            "ocr",
            ["Did it learn? Held-out ocr rose", "Held-out loss rose"],
            ["Reward: ocr", "Reward: jpeg", "Held-out loss"],
        ),
        (
            WEIGHTED,
            ["Did it learn? Held-out weighted reward rose", "Held-out loss rose"],
            ["Reward: weighted reward", "Reward: jpeg", "Held-out loss"],
        ),
        ("loss", ["Did it learn? Held-out loss rose", "Held-out jpeg rose"], ["Reward", "Held-out loss"]),
        # Of a fragment from before, which has no such number, the first reward is shown.
        ("sharp", ["Did it learn? Held-out jpeg rose", "Held-out loss rose"], ["Reward", "Held-out loss"]),
    ],
)
def test_the_number_that_ranks_policies_says_whether_it_learned(by: str, headings: list[str], curves: list[str]):
    shown = section(report_page(ranked(by)).decode(), "learned")
    assert re.findall(r"<h2>(.*?)</h2>", shown) == headings
    assert ("Policies are ranked by it." in shown.partition("<h2>Held-out")[0]) == (by != "sharp")
    assert shown.count("Policies are ranked by it.") == (by != "sharp")
    assert ("weighted sum of the rewards" in shown) == (by == WEIGHTED)
    assert re.findall(r"<h3>(.*?)</h3>", shown)[: len(curves)] == curves


def test_samples_that_changed_most_are_shown_before_and_after(page: str):
    shown = section(page, "changes")
    cards = re.findall(r'class="card (\w+)".*?<b>([\d.]+)</b>.*?<b>([\d.]+)</b>', shown, re.DOTALL)
    assert cards == [("better", "0", "0.5"), ("better", "0.5", "1")]
    assert shown.count("<img") == 4


def test_failures_are_counted_with_their_reasons(page: str):
    shown = section(page, "failed")
    assert "Of 12 training samples 0 were not finite, 1 got no score by one of the rewards" in shown
    assert "and 3 were not trained on" in shown  # the updates say so: 1 and 2
    reason = "ValueError: &lt;i&gt;no&lt;/i&gt; text"
    assert f"<td>no score</td><td>jpeg</td><td>{reason}</td><td>2</td><td>0, policy 2</td>" in shown


def test_samples_that_a_guardrail_refuses_are_in_the_sentence_about_failures():
    refused = Failure(what="refused", reward="", reason="blocked", count=2)
    broken = Failure(what="not finite", reward="", reason="", count=1)
    pieces = [Piece(Excerpt(k=k, samples=700, failures=(refused, broken))) for k in (0, 1)]
    shown = section(report_page(Book(title="refused", reward="", iterations=pieces)).decode(), "failed")
    assert (
        "<p>Of 1,400 training samples 2 were not finite, 4 were refused by the guardrail, 0 got no score by one of the "
        "rewards, 0 were held back by gates, and 0 were not trained on.</p>"
    ) in shown


def test_optimizer_numbers_name_the_iteration_with_the_largest_value(page: str):
    shown = section(page, "training")
    assert "KL divergence to the reference</h3>" in shown
    assert "newest 0.5 · largest 0.5 in iteration 1 (step 1)" in shown
    assert "Ratio of new to old density" not in shown  # not a number in any step


def test_lineage_names_what_each_policy_was_trained_on(page: str, run_inputs: dict[str, list[Input]]):
    update = Artifact(run_inputs["updates"][1]).manifest
    rollouts, scores, before = (update.inputs[role][0].content[:12] for role in ("rollouts", "scores", "policy"))
    row = ["2", update.part_content("current")[:12], f"1: {before}", rollouts, scores, "–", "1"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in section(page, "lineage")


def test_the_page_shows_model_seed_and_changed_settings(page: str):
    shown = section(page, "run")
    for name, value in (("model", "tiny (sd3)"), ("seed", "7"), ("train.optm_lr", "0.01")):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in shown


def test_every_text_is_escaped(tmp_path: Path, run_inputs: dict[str, list[Input]]):
    page = page_of(tmp_path, run_inputs, title="<script>1</script>")
    assert "&lt;script&gt;" in page
    assert "a sign &lt;b&gt;A &amp; B&lt;/b&gt;" in page
    assert "<script" not in page
    assert "<b>A" not in page


def test_characters_that_change_a_terminal_or_the_order_of_a_text_are_shown(
    tmp_path: Path, run_inputs: dict[str, list[Input]]
):
    page = page_of(tmp_path, run_inputs, title="a\x1b[2J\u202eb")
    assert r"a\x1b[2J\u202eb" in page
    assert not {"\x1b", "\u202e"} & set(page)


def test_the_page_needs_nothing_from_elsewhere(page: str):
    sources = re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?([^\"')>]*)", page)
    places = {source for source in sources if not source.startswith("data:image/webp;base64,")}
    assert len(places) < len(sources)
    assert all(place.startswith("#") and page.count(f'id="{place[1:]}"') == 1 for place in places)


def test_equal_inputs_give_equal_bytes_and_name_no_place(tmp_path: Path, run_inputs: dict[str, list[Input]]):
    again = page_of(tmp_path / "again", inputs_of_run(tmp_path / "other"))
    assert again == page_of(tmp_path, run_inputs)
    assert str(tmp_path) not in again


@pytest.mark.parametrize("roles", [(), ("updates",), ("judged",), ("fragments",), ("fragments", "judged")])
def test_any_input_may_be_missing(tmp_path: Path, run_inputs: dict[str, list[Input]], roles: tuple[str, ...]):
    page = page_of(tmp_path, {role: run_inputs[role] for role in roles})
    assert "<h1>my run</h1>" in page
    assert not re.search(r"\bnan\b|\bNone\b", page)


def test_a_run_without_pictures_says_why_there_are_none(tmp_path: Path):
    made = iteration(tmp_path, 0, finite=False)
    page = page_of(tmp_path, {role: [made[role]] for role in ("fragments", "updates")})
    assert "no picture: the sample is not finite" in section(page, "iterations")
    assert "6 were not finite" in section(page, "failed")
    assert "<img" not in page


def test_a_fragment_of_another_version_is_refused(tmp_path: Path, run_inputs: dict[str, list[Input]]):
    other = fragment(tmp_path, 0, inputs={})
    entry = Artifact(other).entry("fragment.json")
    (Path(other.url) / entry.path).write_bytes(b'{"k":0,"x":1}'.ljust(entry.size))
    with pytest.raises(ArtifactError, match="sha256"):
        page_of(tmp_path, {"fragments": [other]})


@pytest.mark.parametrize(
    ("mean", "error", "words"),
    [(0.5, 0.0123, "0.500 ± 0.012"), (-21.26, 1.5, "−21.3 ± 1.5"), (0.5, float("nan"), "0.5"), (3.0, 0.0, "3 ± 0")],
)
def test_an_estimate_has_as_many_digits_as_its_error_allows(mean: float, error: float, words: str):
    assert str(Estimate(mean, error, 4, 4)) == words


def test_the_stages_start_without_torch():
    program = "import stages.report, stages.fragment, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
