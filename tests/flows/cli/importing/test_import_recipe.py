"""Files of cosmos-rl on the command line."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from cosmos_rl_core.conformance.kinds import hf_folder
from flows.cli import app as cli
from tests.core.vlms import tiny
from tests.core.vlms.cases import QWEN3
from tests.little_room import little_room

FOLDER = Path(__file__).parents[3] / "core/upstream_recipes"
VLMS = Path(__file__).parents[3] / "core/upstream_vlm_recipes"
SD3 = FOLDER / "stable-diffusion-3-5-medium-nft.toml"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(cli.app, list(map(str, words)))


@pytest.fixture
def small(tmp_path: Path, words) -> Path:
    """cosmos-rl's recipe of Stable Diffusion 3, with the tiny model and prompts that are there."""
    (tmp_path / ".cache/cosmos_rl/diffusion_nft/ocr").mkdir(parents=True)
    prompts = "\n".join(f"prompt {index}" for index in range(48))
    (tmp_path / ".cache/cosmos_rl/diffusion_nft/ocr/train.txt").write_text(prompts, encoding="utf-8")
    text = SD3.read_text(encoding="utf-8")
    for old, new in (
        ('"stabilityai/stable-diffusion-3.5-medium"', '"package:tiny-sd3"'),
        ("inference_size = [512, 512]", "inference_size = [32, 64]"),
        ('split = "train"\nname = "pickscore"', 'split = "train"\nname = "ocr"'),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "theirs.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_report_names_every_key_and_its_translation(run):
    result: Result = run("import-recipe", SD3)
    assert result.exit_code == 0, result.output
    for expected in ("policy.diffusers.timestep_fraction = 0.99", "train.train_policy.timesteps_fraction = 0.99",
                     "misspelt", "policy.parallelism.dp_shard_size = 8", "(diffusers): "):  # fmt: skip
        assert expected in result.output


def test_a_file_of_cosmos_rl_is_planned_directly_with_a_note_of_one_line(run, small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run("plan", small)
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.splitlines()
    assert "is a file of cosmos-rl (diffusers): " in line
    assert line.endswith(f"every key: cosmos-flows import-recipe {small}")
    assert "nft, 1000 iterations, seed 42" in result.stdout

    output = tmp_path / "ours.toml"
    assert run("import-recipe", small, "--output", output).exit_code == 0
    ours = run("plan", output)
    assert (ours.exit_code, ours.stderr) == (0, "")
    of_theirs, of_ours = (text.stdout.splitlines()[2:] for text in (result, ours))
    assert of_theirs == of_ours
    again = run("import-recipe", small, "--output", output)
    assert (again.exit_code, "exists; name another" in again.stderr) == (64, True)


def test_a_full_disk_leaves_no_truncated_recipe(run, small, tmp_path):
    output = tmp_path / "ours.toml"
    with little_room(100):
        full = run("import-recipe", small, "--output", output)
    assert (full.exit_code, "no space left to write" in full.stderr) == (75, True)
    assert run("import-recipe", small, "--output", output).exit_code == 0


@pytest.mark.parametrize("command", ["plan", "run", "import-recipe"])
def test_unknown_keys_end_every_command_with_64_and_are_all_named(run, small, tmp_path, command):
    small.write_text(small.read_text(encoding="utf-8").replace("nft_beta", "nft_betta").replace("optm_lr", "optm_rl"))
    output = tmp_path / "ours.toml"
    result = run(command, small, *(["--output", output] if command == "import-recipe" else []))
    assert result.exit_code == 64
    assert "policy.diffusers.nft_betta: unknown key; did you mean 'policy.diffusers.nft_beta'?" in result.stderr
    assert "train.optm_rl: unknown key; did you mean 'train.optm_lr'?" in result.stderr
    assert not output.exists()


def test_overrides_use_the_names_of_our_settings(run, small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    result = run("plan", small, "--iterations", 3, "--set", "train.train_policy.nft_beta=0.1")
    assert (result.exit_code, "nft, 3 iterations" in result.stdout) == (0, True)


def test_a_recipe_of_our_own_cannot_be_imported(run):
    result = run("import-recipe", "configs/tiny/nft.toml")
    assert result.exit_code == 64
    assert "neither of cosmos-rl's schemas" in result.stderr
    assert tomllib.loads(Path("configs/tiny/nft.toml").read_text(encoding="utf-8"))["train"]["num_iterations"] == 16


@pytest.fixture
def vlm(tmp_path: Path) -> dict[str, str]:
    """What cosmos-rl's recipes of Cosmos-Reason2 name, and what is there in place of it."""
    save_file({"one": np.zeros(1, dtype=np.float32)}, tmp_path / "model.safetensors")
    rows = [{"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]}] * 256
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    hf_folder.save(tmp_path / "chats", {"conversations": pa.array([json.dumps(chat)] * 256)}, {})
    return {
        '"nvidia/Cosmos-Reason2-2B"': json.dumps(tiny.save(tmp_path, QWEN3)),
        '"data/sft/annotations.json"': json.dumps(str(tmp_path / "rows.json")),
        '"data/sft/train2017"': '""',
        '"data/sft"': json.dumps(str(tmp_path / "chats")),
    }


@pytest.mark.parametrize("name", ["reason2-llava-sft", "reason2-hf-sft"])
def test_a_recipe_of_reason2_plans_directly_and_after_translation(run, vlm, tmp_path: Path, name: str):
    text = (VLMS / f"{name}.toml").read_text(encoding="utf-8")
    for old, new in vlm.items():
        text = text.replace(old, new)
    theirs, ours = tmp_path / "theirs.toml", tmp_path / "ours.toml"
    theirs.write_text(text, encoding="utf-8")
    planned = run("plan", theirs)
    assert planned.exit_code == 0, planned.output
    assert "is a file of cosmos-rl (vlm): " in planned.stderr
    assert "custom: 256 conversations" in planned.stdout
    # 256 conversations are 2 steps of 32 on each of 4 ranks.
    assert "2 steps x 128 conversations" in planned.stdout
    imported = run("import-recipe", theirs, "--output", ours)
    assert imported.exit_code == 0, imported.output
    assert "(vlm): " in imported.stdout
    again = run("plan", ours)
    assert (again.exit_code, again.stderr) == (0, "")
    assert again.stdout.splitlines()[2:] == planned.stdout.splitlines()[2:]
