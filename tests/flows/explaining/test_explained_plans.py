"""Plans in words: what would run, what is written, and the memory of a rank."""

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from flows.cli import app as cli
from tests.flows.sizes.test_planned_memory import FULL, printed, table_of


def test_planning_says_what_would_run_and_writes_nothing(recipe, tmp_path):
    place = tmp_path / "store"
    place.mkdir()
    ended = CliRunner().invoke(cli.app, ["plan", recipe(), "--store", str(place), "--run-id", "mine"])
    assert ended.exit_code == 0, ended.stderr
    assert "iteration  2 prompts x 4 samples, 10 euler steps, guidance 1" in ended.stdout
    assert "prompts    4 to train on, 0 held out" in ended.stdout
    assert list(place.iterdir()) == []


KL = ("timesteps_fraction = 1.0", "timesteps_fraction = 1.0\nkl_beta = 0.1")


@pytest.mark.parametrize(
    ("full", "elements", "written"),
    [
        # Two factors of rank 2 on four matrices of 128 x 128 in each of four blocks.
        (False, 4 * 4 * 2 * 256, "160 KiB an iteration: current 32 KiB, old 32 KiB, ema 32 KiB, optimizer 64 KiB"),
        (True, 2309008, "44.05 MiB an iteration: current 8.81 MiB, old 8.81 MiB, ema 8.81 MiB, optimizer 17.62 MiB"),
    ],
    ids=["lora", "full"],
)
def test_a_plan_names_the_bytes_of_every_copy_of_a_policy(recipe, full: bool, elements: int, written: str):
    path = recipe(KL, *([FULL] if full else []))
    lines = printed(path, "train.ema_enable=true")
    table = table_of(lines)
    assert table["a rank's memory, MiB"] == ["embed", "export", "rollout", "update"]
    for part in ("old", "ema", "reference", "gradients"):
        assert table[part] == [f"{4 * elements / 2**20:.2f}"]
    # Rollouts by an older policy are of other weights than the old copy that training goes on from.
    assert "behaviour" not in table
    assert table_of(printed(path, "train.staleness=1"))["behaviour"] == table["old"]
    assert table["optimizer"] == [f"{8 * elements / 2**20:.2f}"]
    assert f"           a policy of {written}" in lines


@pytest.mark.parametrize(("param_dtype", "size", "said"), [("float32", 4, "1.176 MiB"), ("bfloat16", 2, "602 KiB")])
def test_the_weights_of_a_scorer_with_torch_count_on_each_rank_of_judge(
    recipe, tmp_path, param_dtype: str, size: int, said: str
):
    folder = tmp_path / "clip"
    folder.mkdir()
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    stored = {"a": np.zeros((300, 1024), np.float16), "b": np.zeros(1024, np.float32)}
    safetensors.numpy.save_file(stored, folder / "model.safetensors")
    options = f"name = 'clip_score', model = '{folder}', param_dtype = '{param_dtype}'"
    lines = printed(recipe(), f"rewards=[{{ fn = {{ {options} }} }}]", "launch.stage_processes.judge=2")
    table = table_of(lines)
    assert table["a rank's memory, MiB"] == ["embed", "export", "rollout", "judge", "update"]
    assert table["ranks"][3] == "2"
    assert table["weights of the scorer"] == [f"{size * 301 * 1024 / 2**20:.2f}"]
    weights = f"{said} of weights on each rank of judge"
    assert f"judges     clip_score: {weights}; not known are its activations and arithmetic" in lines
