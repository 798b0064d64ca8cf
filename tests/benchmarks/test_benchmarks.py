"""The benchmarks on tiny shapes, and what they say of the true ones without measuring anything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages import torch_runtime
from tests.benchmarks import __main__ as bench
from tests.benchmarks import flops, models
from tests.benchmarks.models import Shape


@pytest.mark.parametrize("name", models.known())
def test_a_true_shape_has_as_many_weights_as_are_published(name: str):
    shape = Shape.read(name)
    model = shape.empty_model(flops.META)
    assert sum(parameter.numel() for parameter in model.transformer.parameters()) == shape.num_parameters


def test_attention_is_counted_as_four_times_the_width_for_each_pair_of_tokens():
    """Between sizes of 1, 2 and 3 tokens: what grows otherwise than linearly."""
    tiny = Shape.read("sd3_5_medium", tiny=True)
    one, two, three = (flops.forward_flops(replace(tiny, size=(16, 16 * tokens))) for tokens in (1, 2, 3))
    # Two blocks attend to text and image together, and the first one once more to the image alone.
    assert three - 2 * two + one == 2 * 4 * 16 * 3


def test_a_run_on_tiny_shapes_says_what_it_was_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert bench.main(["sd3_5_medium", "--tiny", "--repeats", "1", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["what"] == "cpu, tiny shapes"
    assert result["device"] == "cpu"
    rows = {(row["work"], row["param_dtype"]): row for row in result["measured"]}
    assert len(rows) == len(result["measured"]) == 6
    assert all(row["seconds"] > 0 and row["mfu"] is None for row in rows.values())
    forward = flops.forward_flops(Shape.read("sd3_5_medium", tiny=True))
    # A batch of 2: 3 steps; old and reference beside a trained pass; the old one beside two trained ones.
    passes = {"sampling": 3, "nft step": 2 + 2, "ddrl step": 1 + 2 + 2}
    assert {work: row["flops"] for (work, _), row in rows.items()} == {w: 2 * n * forward for w, n in passes.items()}
    assert [ratio["of"] for ratio in result["ratios"]] == ["float32"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_the_true_shapes_are_not_measured_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--output", str(tmp_path)]) == 1
    assert "need a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_peak_of_a_device_that_is_not_listed_is_unknown():
    assert flops.peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert flops.peak_flops("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert flops.peak_flops("Graphics of another maker", "bfloat16") is None
