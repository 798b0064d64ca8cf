"""Figures of pages: those of docs/from-demo-to-sd3.5.md follow from the model's config, others were measured."""

import json
from typing import Any

import pytest

from tests.benchmarks.flops import forward_flops
from tests.benchmarks.models import Shape
from tests.benchmarks.record import FOLDER
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "from-demo-to-sd3.5.md").read_text(encoding="utf-8")
SAMPLES, STEPS, LEVELS, PASSES = 1152, 10, 9, 5
"""Of configs/nft/sd3.toml: samples and solver steps of a rollout; noise levels and passes of an update."""


@pytest.mark.slow
def test_the_arithmetic_of_an_iteration_is_that_of_the_config():
    forward = forward_flops(Shape.read("sd3_5_medium"))
    assert f"{forward / 1e12:.2f} TFLOP " in PAGE
    assert f"{SAMPLES} samples x {STEPS} steps | {SAMPLES * STEPS * forward / 1e15:.0f} |" in PAGE
    assert f"{SAMPLES} samples x {LEVELS} noise levels x {PASSES}:" in PAGE
    assert f"| {SAMPLES * LEVELS * PASSES * forward / 1e15:.0f} |" in PAGE


RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def measured(part: str) -> list[dict[str, Any]]:
    """The rows of the newest results of :mod:`tests.benchmarks.data`."""
    newest = max(FOLDER.glob(f"*-cpu-data-{part}.json"))
    return json.loads(newest.read_text(encoding="utf-8"))["measured"]


def test_the_speed_of_preparing_data_is_that_of_the_results():
    for row in measured("speed"):
        height, width = row["size"]
        core = row["core"]
        rates = f"{core['items_per_s']:.0f} | {core['plain_items_per_s']:.0f} | {core['ratio']:.2f}"
        assert f"| `{row['stage']}` | {row['source']}, {height} x {width} | {rates} |" in RESULTS


def test_the_memory_of_preparing_data_is_that_of_the_results():
    for row in measured("memory"):
        peaks = " | ".join(f"{peak / 1e6:.0f} MB" for peak in row["peak_bytes"])
        assert row["items"] == [1000, 10_000]
        assert f"| `{row['stage']}` | {peaks} |" in RESULTS


def test_the_seconds_without_a_change_and_from_a_slow_store_are_those_of_the_results():
    (same,), (slow,) = measured("unchanged"), measured("ahead")
    assert f"{same['items']:,} pictures and no change: {same['seconds']:.1f} s, {same['core_seconds']:.1f} s" in RESULTS
    times = slow["times_local"]
    assert f"{1000 * slow['latency_s']:.0f} ms later" in RESULTS
    assert f"{times['slow']:.2f} times" in RESULTS
    assert f"{times['slow, read when needed']:.2f} times" in RESULTS


def test_the_speed_of_the_reward_service_is_that_of_the_results():
    newest = json.loads(max(FOLDER.glob("*-cpu-rewards.json")).read_text(encoding="utf-8"))
    for row in newest["measured"]:
        rates = f"{row['scores_per_s']:.1f} | {row['plain_scores_per_s']:.1f} | {row['ratio']:.2f}"
        assert f"| {row['scorer']} | {row['processes']} | {rates} |" in RESULTS
    settings = newest["settings"]
    assert f"{settings['samples']} pictures of {settings['size']} x {settings['size']}" in RESULTS
    assert f"requests of {settings['batch']}" in RESULTS


def test_the_speed_of_scoring_beside_the_rollout_is_that_of_the_results():
    newest = json.loads(max(FOLDER.glob("*-cpu-overlap.json")).read_text(encoding="utf-8"))
    (row,) = newest["measured"]
    assert f"{row['beside_s']:.1f} s in place of {row['after_s']:.1f} s, {row['ratio']:.2f} times" in RESULTS
    settings = newest["settings"]
    assert f"waits {settings['wait_s']} s a sample" in RESULTS
    assert f"{settings['repeats']} x {settings['iterations']} iterations" in RESULTS
