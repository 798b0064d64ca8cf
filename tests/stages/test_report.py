import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flows.requests import Run
from stages.artifacts import Artifact, input_of
from stages.report_html import Picture, comparison, curve, group, page
from stages.samples import read_table
from tests.stages.conftest import make, make_run
from tests.stages.test_pins import recipe


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """One iteration of a tiny run, with evaluations before and after, and its page."""
    tmp_path = tmp_path_factory.mktemp("report")
    nft = {"type": "nft", "batch_size_per_optimize": 4, "timesteps_fraction": 0.5, "dataset": {"name": "ocr"}}
    run = make_run(tmp_path, recipe(nft, lora={"r": 2, "target_modules": ["to_q", "to_v"]}), "reported")
    for request in (run.policy(), run.embed()):
        make(request, tmp_path)
    make(run.rollout(0), tmp_path)
    make(run.rewards(run.iteration(0, "rollout"), 0)[0], tmp_path)
    make(run.update(0), tmp_path)
    for k in (0, 1):
        make(run.export(k), tmp_path)
        make(run.evaluate(k), tmp_path)
        make(run.rewards(run.evaluate(k).slot, k)[0], tmp_path)
    make(run.report(1, [0, 1]), tmp_path)
    return run, Artifact(input_of(run.slot("report"))).read("index.html").decode()


def test_the_page_says_the_held_out_rewards_with_their_standard_errors(reported: tuple[Run, str]):
    run, html = reported
    for k in (0, 1):
        scores = read_table(Artifact(input_of(run.slot("exports", f"{k:04d}", "evaluate-ocr"))), "scores.parquet")
        mean, error = scores["score"].mean(), scores["score"].std(ddof=1) / len(scores) ** 0.5
        assert f"{mean:.3f} <small>± {error:.3f}</small>" in html


def test_best_and_worst_of_the_widest_groups_are_shown_with_their_advantages(reported: tuple[Run, str]):
    run, html = reported
    table = read_table(Artifact(input_of(run.policy_after(1))), "advantages.parquet")
    spread = table.groupby("prompt_id")["reward"].agg(lambda r: r.max() - r.min())
    members = pd.DataFrame(table[table["prompt_id"] == spread.idxmax()]).to_dict("records")
    ordered = sorted(members, key=lambda row: (row["reward"], row["sample_id"]))
    for row in (ordered[0], ordered[-1]):
        assert f"{row['reward']:.2f} advantage {row['advantage']:+.2f}" in html


def test_the_page_needs_nothing_from_elsewhere(reported: tuple[Run, str]):
    _, html = reported
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'(?:src|href)="([^"]*)"', html))
    assert "<script" not in html


def test_every_text_is_escaped():
    picture = Picture(np.zeros((1, 2, 2, 3), np.uint8), '<b>"&', 0.5)
    html = page("<i>", [comparison([(picture, picture)]), group("<u>", [picture]), curve("<s>", {"<q>": [(0, 1, 0)]})])
    assert not re.search(r"<(b|i|u|s|q)>", html)


def test_of_a_video_the_first_middle_and_last_frames_are_shown():
    pixels = np.stack([np.full((2, 3, 3), value, np.uint8) for value in range(5)])
    html = group("p", [Picture(pixels, "p", 1.0)])
    shown = np.concatenate([pixels[0], pixels[2], pixels[4]], axis=1)[None]
    assert html == group("p", [Picture(shown, "p", 1.0)])


def test_a_run_without_anything_to_show_still_has_a_page(tmp_path: Path):
    run = make_run(tmp_path, recipe({"type": "nft", "dataset": {"name": "ocr"}}, lora={"r": 2}), "empty")
    manifest = make(run.report(0, []), tmp_path)
    assert manifest.files.keys() == {"index.html"}
