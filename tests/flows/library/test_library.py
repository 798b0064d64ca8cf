"""A run opened from Python, and the notebook that shows how."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cosmos_rl_core.errors import ArtifactError, ConfigError
from cosmos_rl_core.recipes.reading import read_values
from flows.library import OpenedRun, open_run
from flows.planning.plan import METRICS_FILE
from flows.planning.run import Run
from flows.session import loop
from flows.watching.tracking import Tracker
from stages import contracts
from stages.artifacts.artifact import Artifact
from stages.artifacts.manifest import Manifest
from stages.artifacts.request import Request
from stages.artifacts.slots import input_of
from stages.formats.samples import read_samples
from stages.formats.tables import read_table
from tests.pages import ROOT
from tests.stages.conftest import FEW_PROMPTS, make, make_run

NOTEBOOK = ROOT / "docs" / "library.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The shipped tiny run cut to one iteration of 8 samples, with 2 held-out ones of each policy."""
    folder = tmp_path_factory.mktemp("library")
    held_out = folder / "words"
    held_out.mkdir()
    (held_out / "train.txt").write_text('a sign that says "KR"\na sign that says "TM"\n', encoding="utf-8")
    values = read_values(str(ROOT / "configs" / "tiny" / "nft.toml"))
    values["policy"]["diffusers"]["sample"] |= {"num_steps": 2, "eval_num_steps": 2}
    values["train"] |= {"num_iterations": 1, "train_batch_per_replica": 8}
    values["train"]["train_policy"] |= {"dataset": FEW_PROMPTS, "mini_batch": 4, "batch_size_per_optimize": 4}
    values["train"]["train_policy"]["timesteps_fraction"] = 1.0
    values["rollout"] |= {"n_generation": 4, "n_generation_mini_batch": 4, "samples_per_shard": 4}
    values["validation"] |= {"n_generation": 1, "dataset": {"name": "ocr", "local_dir": str(held_out)}}
    made = make_run(folder, values)
    with Tracker(made, lambda _: None) as tracker:

        def launch(_: str, *asked: Request) -> list[Manifest]:
            manifests = [make(request, folder) for request in asked]
            tracker.done(asked, manifests)
            return manifests

        loop.make(made, launch)
    return made


@pytest.fixture(scope="module")
def opened(run: Run) -> OpenedRun:
    return open_run(run.url)


def test_samples_have_the_scores_and_advantages_of_the_artifacts(run: Run, opened: OpenedRun):
    table = opened.samples(0)
    scores = read_table(Artifact(input_of(run.slots.iteration(0, "reward-ocr"))), contracts.Reward.SCORES)
    trained = read_table(Artifact(input_of(run.slots.policy(1))), contracts.Update.ADVANTAGES)
    assert len(table) == 8
    by_id = table.set_index("sample_id")
    assert by_id["ocr"].to_dict() == scores.set_index("sample_id")["score"].to_dict()
    assert by_id["advantage"].to_dict() == trained.set_index("sample_id")["advantage"].to_dict()
    assert by_id["ocr.error"].tolist() == [""] * 8


def test_pictures_equal_the_pixels_of_the_rollout(run: Run, opened: OpenedRun, tmp_path: Path):
    table = opened.samples(0)
    stored = list(read_samples(Artifact(input_of(run.slots.iteration(0, "rollout")))))
    assert [one.sample_id for one in stored] == table["sample_id"].tolist()
    for sample, picture in zip(stored, table["picture"], strict=True):
        assert np.array_equal(picture.pixels(), sample.pixels)
        assert picture.save(tmp_path).read_bytes() == sample.media


def test_numbers_of_stages_equal_the_metrics(opened: OpenedRun):
    stages, metrics = opened.stages().set_index("name"), opened.metrics()
    assert {*stages["state"]} == {"stands"}
    (mean,) = metrics.loc[metrics["policy_version"] == 1, "val/reward_avg"]
    assert stages.loc["policy-0001/evaluate-ocr", "reward"] == mean == opened.held_out(1)["ocr"].mean()
    assert stages["k"].dropna().tolist() == [0] * 8 + [1] * 4


def test_metrics_are_the_numbers_of_the_file_to_the_last_bit(run: Run, opened: OpenedRun):
    table = opened.metrics()
    lines = Path(run.url, METRICS_FILE).read_text(encoding="utf-8").splitlines()
    told = [
        (number, name, value)
        for number, line in enumerate(lines)
        for name, value in json.loads(line).items()
        if isinstance(value, float)
    ]
    assert len(told) > 20
    assert [(number, name, float(table.at[number, name])) for number, name, _ in told] == told


def test_a_policy_gives_its_tensors_and_its_export(opened: OpenedRun, tmp_path: Path):
    first, last = opened.policy(0), opened.policy(1)
    assert first.digest != last.digest
    assert {"current", "old", "optimizer"} <= {*last.parts}
    assert {*first.tensors()} == {*last.tensors("old")}
    assert (last.export(tmp_path) / "lora" / "model.safetensors").stat().st_size > 1000
    with pytest.raises(ConfigError, match="no part 'other'; it has current, old"):
        last.tensors("other")


def test_missing_iterations_versions_and_runs_are_named(run: Run, opened: OpenedRun, tmp_path: Path):
    for look in (opened.samples, lambda k: opened.held_out(k + 1), lambda k: opened.policy(k + 1)):
        with pytest.raises(ConfigError, match=r"run has no .* 1|run has no .* 2"):
            look(1)
    with pytest.raises(ConfigError, match="there is no run 'other'"):
        open_run("other", str(tmp_path))
    for url, store_url in (("/runs/other", "/"), (f"{tmp_path}/runs/other", tmp_path), ("runs/other", Path.cwd())):
        with pytest.raises(ConfigError, match=f"there is no run 'other' in the store {re.escape(str(store_url))};"):
            open_run(url)


def test_a_changed_picture_is_an_error_and_never_shown(run: Run, opened: OpenedRun):
    (media,) = Path(run.slots.iteration(0, "rollout")).glob("attempts/*/media/00000.tar")
    data = media.read_bytes()
    try:
        media.write_bytes(data[:600] + bytes([data[600] ^ 1]) + data[601:])
        with pytest.raises(ArtifactError, match=r"media/00000\.tar"):
            opened.samples(0).iloc[0]["picture"].pixels()
    finally:
        media.write_bytes(data)


def test_the_notebook_runs(run: Run):
    here: dict[str, Any] = {}
    shown = [
        value for cell in json.loads(NOTEBOOK.read_text())["cells"] if (value := execute(cell, run, here)) is not None
    ]
    assert any("image/webp" in getattr(value, "_repr_html_", str)() for value in shown)
    assert here["held_out"]["val/rollout_count"].tolist() == [2, 2]


def execute(cell: dict[str, Any], run: Run, here: dict[str, Any]) -> Any:
    """The value of a cell's last line, after it ran on this run; None without one."""
    if cell["cell_type"] != "code":
        return None
    code = "".join(cell["source"])
    if "parameters" in cell["metadata"].get("tags", ()):
        code = f"RUN, STORE = {run.plan.run_id!r}, {run.store_url!r}"
    *lines, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        lines.append(last)
    exec(compile(ast.Module(lines, []), str(NOTEBOOK), "exec"), here)
    return (
        eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), here) if isinstance(last, ast.Expr) else None
    )
