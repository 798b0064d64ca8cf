"""Figures of docs/from-demo-to-sd3.5.md that follow from the model's config alone."""

import pytest

from tests.benchmarks.flops import forward_flops
from tests.benchmarks.models import Shape
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
