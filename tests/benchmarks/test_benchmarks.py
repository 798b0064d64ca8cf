"""The benchmarks on tiny shapes, and what they say of the true ones without measuring anything."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest

from flows.planning import requests
from flows.planning.plan import Settings, freeze, plan_of
from flows.planning.run import Run
from stages.artifacts.artifact import Artifact
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.contracts import METRICS
from stages.formats.tables import read_table
from tests.benchmarks import __main__ as bench
from tests.benchmarks import (
    data,
    empty_stages,
    every,
    flops,
    iteration,
    long_runs,
    models,
    one_core,
    overlap,
    pictures,
    ranks,
    rewards,
    vlm,
)
from tests.benchmarks.models import Shape
from tests.benchmarks.naive_loop import NaiveLoop, Variant
from tests.hand_made import rewards as scored_by
from tests.stages.conftest import FEW_PROMPTS, make


@pytest.mark.parametrize("name", models.known())
def test_a_true_shape_has_as_many_weights_as_it_says(name: str):
    """By its class alone: the model plugin asks for torchvision where Cosmos has a padding mask."""
    shape = Shape.read(name)
    with flops.META:
        transformer = getattr(diffusers, shape.components["transformer"]).from_config(shape.configs["transformer"])
    assert sum(parameter.numel() for parameter in transformer.parameters()) == shape.num_parameters


def test_attention_is_counted_as_four_times_the_width_for_each_pair_of_tokens():
    """Between sizes of 1, 2 and 3 tokens: what grows otherwise than linearly."""
    tiny = Shape.read("sd3_5_medium", tiny=True)
    one, two, three = (flops.forward_flops(replace(tiny, size=(16, 16 * tokens))) for tokens in (1, 2, 3))
    # Two blocks attend to text and image together, and the first one once more to the image alone.
    assert three - 2 * two + one == 2 * 4 * 16 * 3


@pytest.mark.parametrize("name", models.known())
def test_a_run_on_tiny_shapes_names_its_device(name: str, tmp_path: Path):
    assert bench.main([name, "--tiny", "--repeats", "1", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == f"{result['date']}-cpu-tiny-shapes.json"
    assert result["device"] == "cpu"
    rows = {row["work"]: row for row in result["measured"]}
    assert all(row["seconds"] > 0 and row["mfu"] is None for row in rows.values())
    shape = Shape.read(name, tiny=True)
    # EDM asks once more at its end. A trained pass comes with old and reference; two trained ones with the old one.
    passes = {"sampling": shape.num_steps + (shape.solver == "edm"), "nft step": 2 + 2, "ddrl step": 1 + 2 + 2}
    expected = {work: n * shape.batch * flops.forward_flops(shape) for work, n in passes.items()}
    assert {work: row["flops"] for work, row in rows.items()} == expected


def test_the_true_shapes_are_not_measured_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench.main(["--output", str(tmp_path)]) == 1
    assert "need a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_peak_of_a_device_that_is_not_listed_is_unknown():
    assert flops.peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert flops.peak_flops("NVIDIA H200 NVL", "bfloat16") is None
    assert flops.peak_flops("NVIDIA H200", "float32") is None


@pytest.mark.slow
def test_the_preparation_of_data_is_measured_in_parts(tmp_path: Path):
    settings = ["--items", "12", "--sizes", "2", "4", "--repeats", "1", "--output", str(tmp_path)]
    assert data.main(settings) == 0
    found = {path.name[11:]: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()}
    assert found.keys() == {f"cpu-data-{part}.json" for part in data.PARTS}
    (steps,) = found["cpu-data-ahead.json"]["measured"]
    assert set(steps["times_local"]) == {"local", "slow", "slow, read when needed"}
    assert all(row["core"]["ratio"] for row in found["cpu-data-speed.json"]["measured"])


@pytest.mark.slow
@pytest.mark.processes
def test_the_service_is_compared_with_a_loop_of_the_same_scorer(tmp_path: Path):
    few = ["--samples", "4", "--batch", "2", "--size", "256", "--sample-s", "0.002", "--repeats", "1"]
    assert rewards.main([*few, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text(encoding="utf-8"))["measured"]
    assert [(row["scorer"], row["processes"]) for row in rows] == [*rewards.CASES]
    assert all(row["ratio"] == pytest.approx(row["scores_per_s"] / row["plain_scores_per_s"]) for row in rows)


@pytest.mark.slow
@pytest.mark.processes
def test_scoring_during_the_rollout_is_measured_with_equal_policies(tmp_path: Path):
    few = ["--wait-s", "0.01", "--num-steps", "4", "--iterations", "1", "--repeats", "1", "--output", str(tmp_path)]
    assert overlap.main(few) == 0
    (path,) = tmp_path.iterdir()
    (row,) = json.loads(path.read_text(encoding="utf-8"))["measured"]
    assert row["ratio"] == pytest.approx(row["beside_s"] / row["after_s"])


@pytest.mark.slow
@pytest.mark.processes
def test_rollout_and_update_are_measured_on_one_rank_and_on_two(tmp_path: Path):
    assert ranks.main(["--samples", "24", "--repeats", "1", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["ranks"], row["samples"]) for row in found["measured"]] == [(1, 24), (2, 24)]
    one, two = (row["rollout_s"] + row["update_s"] for row in found["measured"])
    assert found["times_as_fast"] == pytest.approx(one / two)


@pytest.mark.slow
def test_fine_tuning_of_a_vlm_is_compared_with_a_plain_loop(tmp_path: Path):
    few = ["--rounds", "1", "--steps", "1", "--conversations", "48", "--sizes", "48", "--output", str(tmp_path)]
    assert vlm.main(few) == 0
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["trains"], row["row_tokens"]) for row in found["throughput"]] == [
        ("full", vlm.ROW),
        ("lora", vlm.ROW),
        ("full", vlm.LONG_ROW),
        ("lora", vlm.LONG_ROW),
    ]
    for row in found["throughput"][2:]:
        assert vlm.LONG[0] <= row["conversation_tokens"][0] < row["conversation_tokens"][1] <= vlm.LONG[1]
    for row in found["throughput"]:
        assert row["ratio"] == pytest.approx(row["tokens_per_core_s"] / row["plain_tokens_per_core_s"])
    assert found["peak_mib_by_conversations"]["48"] > 0


def test_the_statistics_of_pictures_are_measured(tmp_path: Path):
    assert pictures.main(["--samples", "4", "--repeats", "1", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text(encoding="utf-8"))["measured"]
    assert [row["shape"] for row in rows] == [[*shape] for shape in pictures.SHAPES]
    assert all(row["samples_per_core_s"] > 0 for row in rows)


def small_iteration(folder: Path) -> tuple[str, list[str]]:
    """A recipe of 24 samples an iteration, and its overrides."""
    words = "".join(f", {name} = '{value}'" for name, value in FEW_PROMPTS.items() if name != "name")
    few = f"train.train_policy.dataset={{ name = 'ocr'{words} }}"
    return one_core.recipe_without_validation(folder), [*one_core.sizes_of(24), few]


def our_steps(recipe: str, overrides: list[str], folder: Path) -> Any:
    """The optimizer steps of the first iteration of a run, by its stages."""
    store = str(folder / "store")
    run = Run(freeze(plan_of(Settings(recipe, store, "ours", overrides=overrides)), store), store)
    before: list[Callable[[], Request]] = [partial(requests.policy, run), lambda: run.prepared.embed]
    for request in (*before, partial(requests.rollout, run, 0)):
        make(request(), folder)
    for reward in scored_by(run, run.slots.iteration(0, "rollout"), 0):
        make(reward, folder)
    make(requests.update(run, 0), folder)
    return read_table(Artifact(input_of(run.slots.iteration(0, "update"))), METRICS)


@pytest.mark.slow
def test_the_naive_loops_take_the_same_first_optimizer_steps_as_the_stages(tmp_path: Path):
    """So that it does the same work, and no other."""
    recipe, overrides = small_iteration(tmp_path)
    # Three steps: after the first one, current and old differ.
    overrides.append("train.train_policy.batch_size_per_optimize=8")
    ours = our_steps(recipe, overrides, tmp_path)
    variants: tuple[Variant, ...] = ("three", "two", "merged")
    for variant in variants:
        told = NaiveLoop(recipe, overrides, variant).iteration()
        assert told["loss"] == pytest.approx(ours["loss"].to_list(), rel=1e-4), variant
        assert told["grad_norm"] == pytest.approx(ours["grad_norm"].to_list(), rel=1e-3), variant


@pytest.mark.slow
@pytest.mark.processes
def test_an_iteration_is_compared_with_naive_loops_of_as_many_samples(tmp_path: Path):
    assert iteration.main(["--samples", "24", "--repeats", "1", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    rows = {row["how"]: row for row in json.loads(path.read_text(encoding="utf-8"))["measured"]}
    assert [*rows] == [*iteration.NAIVE, *iteration.OURS]
    assert all(row["trained"] == [24] for row in rows.values())
    assert all(row["ratio"] == row["iteration_s"] / rows["three"]["iteration_s"] for row in rows.values())
    assert all(math.isfinite(rows[how]["reward"]) and rows[how]["peak_bytes"] > 0 for how in iteration.NAIVE)
    for how in iteration.OURS:
        parts = ("rollout_s", "reward_s", "warn_s", "update_s", "between_s")
        assert rows[how]["iteration_s"] == pytest.approx(sum(rows[how][part] for part in parts))
        assert {"rollout", "reward", "update"} <= rows[how]["peak_bytes"].keys()
    # Write-once files with the same contents, and records of when and how they were made.
    assert rows["warm"]["store_bytes"] == pytest.approx(rows["cold"]["store_bytes"], rel=0.02)


def test_the_imports_of_a_cold_stage_are_told_by_package():
    light, torch = (empty_stages.imports(stage) for stage in ("warn", "export"))
    assert "torch" in torch["by_package"]
    assert "torch" not in light["by_package"]
    for found in (light, torch):
        assert sum(found["by_package"].values()) == pytest.approx(found["seconds"])
        assert all(seconds >= empty_stages.SHOWN_S for name, seconds in found["by_package"].items() if name != "others")


@pytest.mark.slow
@pytest.mark.processes
def test_every_second_of_an_empty_stage_has_a_cause(tmp_path: Path):
    assert empty_stages.main(["--iterations", "1", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text(encoding="utf-8"))["measured"]
    stages = [row for row in rows if row["what"] in empty_stages.STAGES]
    assert {(row["mode"], row["what"]) for row in stages} == {
        (mode, stage) for mode in ("warm", "cold") for stage in empty_stages.STAGES
    }
    for row in stages:
        causes = (*empty_stages.CAUSES, "outside_s")
        # Each is rounded to milliseconds.
        assert sum(row[cause] for cause in causes) == pytest.approx(row["seconds"], abs=1e-3 * len(causes))


@pytest.mark.slow
@pytest.mark.processes
def test_commands_on_long_runs_are_measured_on_both_stores(tmp_path: Path):
    few = ["--iterations", "1", "--commands", "status", "plan", "--output", str(tmp_path)]
    assert long_runs.main(few) == 0
    (path,) = tmp_path.iterdir()
    rows = json.loads(path.read_text(encoding="utf-8"))["measured"]
    assert [(row["store"], row["command"]) for row in rows] == [
        (store, command) for store in ("local", "s3") for command in ("status", "plan")
    ]
    for row in rows[2:]:
        assert row["requests"] == sum(row["requests_by_method"].values())
        assert row["requests_per_artifact"] == row["requests"] / row["artifacts"]
        # These commands only look.
        assert row["requests_by_method"].keys() <= {"GET", "HEAD"}


def test_all_benchmarks_that_store_results_run_by_one_command(capsys: pytest.CaptureFixture[str]):
    assert every.main(["--list"]) == 0
    listed = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    assert {name for name, _, said in listed if said.startswith("Measure")} == {*every.BENCHMARKS}
    texts = {path.stem: path.read_text("utf-8") for path in Path(every.__file__).parent.glob("*.py")}
    storing = {name for name, text in texts.items() if "record.write(" in text or "record.Measured(" in text}
    assert storing - {"test_benchmarks"} == {*every.BENCHMARKS} - {every.GPU} | {"__main__"}
