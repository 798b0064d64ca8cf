"""Figures of pages: in docs/from-demo-to-sd3.5.md they follow from the model's config, others were measured."""

import json
from typing import Any

import pytest

from docs import speed
from tests.benchmarks.flops import forward_flops
from tests.benchmarks.models import Shape
from tests.benchmarks.record import FOLDER
from tests.pages import ROOT

PAGE = (ROOT / "docs" / "from-demo-to-sd3.5.md").read_text(encoding="utf-8")
SAMPLES, STEPS, LEVELS, PASSES = 1152, 10, 9, 4
"""Samples and solver steps of a rollout, noise levels and passes of an update, in configs/nft/sd3.toml."""


@pytest.mark.slow
def test_the_arithmetic_of_an_iteration_follows_from_the_config():
    forward = forward_flops(Shape.read("sd3_5_medium"))
    assert f"{forward / 1e12:.2f} TFLOP " in PAGE
    assert f"{SAMPLES} samples x {STEPS} steps | {SAMPLES * STEPS * forward / 1e15:.0f} |" in PAGE
    assert f"{SAMPLES} samples x {LEVELS} noise levels x {PASSES}:" in PAGE
    assert f"| {SAMPLES * LEVELS * PASSES * forward / 1e15:.0f} |" in PAGE


RESULTS = (ROOT / "docs" / "results-of-data.md").read_text(encoding="utf-8")


def newest(what: str) -> dict[str, Any]:
    """The newest results of a benchmark. Its figures are written by :mod:`docs.figures`."""
    return json.loads(max(FOLDER.glob(f"*-cpu-{what}.json")).read_text(encoding="utf-8"))


def test_how_it_was_measured_is_what_the_page_says():
    assert all(row["items"] == [1000, 10_000] for row in newest("data-memory")["measured"])
    (same,), (slow,) = newest("data-unchanged")["measured"], newest("data-ahead")["measured"]
    assert f"{same['items']:,} pictures and no change" in RESULTS
    assert f"{1000 * slow['latency_s']:.0f} ms later" in RESULTS
    served, overlap = newest("rewards")["settings"], newest("overlap")["settings"]
    assert f"{served['samples']} pictures of {served['size']} x {served['size']}" in RESULTS
    assert f"requests of {served['batch']}" in RESULTS
    assert f"waits {overlap['wait_s']} s a sample" in RESULTS
    assert f"{overlap['repeats']} x {overlap['iterations']} iterations" in RESULTS


def test_the_parts_of_our_iterations_on_the_page_add_up():
    _, *rows = speed.iterations(newest("iteration"))
    ours = [row for row in rows if row[1] in speed.MODES]
    assert ours
    for _, _, whole, _, *parts, _ in ours:
        assert float(whole) == pytest.approx(sum(map(float, parts)), abs=0.005 * (1 + len(parts)))
