"""What the last lines of a run say of its policies."""

from pathlib import Path
from typing import Any

from flows.watching.judged import held_out_lines, held_out_numbers, result_line
from tests.flows.by_hand import HELD_OUT_MEDIA
from tests.flows.judged_runs import judged_by, make_with, run_of


def test_the_last_lines_of_a_run_name_the_ranking_number_and_list_every_reward(recipe: Any, tmp_path: Path):
    run = judged_by(recipe, tmp_path, "")
    assert held_out_lines(run) == [
        "ocr: 0.200 before, 0.733 after, 3 held-out samples each",
        "jpeg: 0.000 before, 0.000 after, 4 held-out samples each",
        "pixel_statistics: 1.000 before, 0.750 after, 4 held-out samples each",
        "held-out weighted reward: 0.200 -> 0.600, over 4 and 2 of 4 samples that count",
    ]
    assert result_line(run, held_out_numbers(run)) == (
        "weighted reward 0.200 -> 0.600, ocr 0.200 -> 0.733, jpeg 0.000 -> 0.000, pixel_statistics 1.000 -> 0.750"
    )


def test_a_run_that_another_reward_ranks_ends_with_that_reward(recipe: Any, tmp_path: Path):
    run = judged_by(recipe, tmp_path, "pixel_statistics")
    assert held_out_lines(run)[-1] == "held-out pixel_statistics: 1.000 -> 0.750"
    assert result_line(run, held_out_numbers(run)).startswith("pixel_statistics 1.000 -> 0.750, ocr 0.200 -> 0.733, ")


def test_a_run_that_a_loss_ranks_ends_with_the_loss(tmp_path: Path):
    run = run_of(tmp_path, "validation.freq=1", HELD_OUT_MEDIA)
    make_with(run, {0: 0.5, 1: 0.3, 2: 0.1, 3: 0.2, 4: 0.4})
    assert held_out_lines(run)[-1] == "held-out loss: 0.500 -> 0.400"
    assert result_line(run, held_out_numbers(run)) == "held-out loss 0.500 -> 0.400, ocr 0.500 -> 0.400"
